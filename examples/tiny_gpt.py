"""A language model in the shape of nanoGPT's train.py: ``python examples/tiny_gpt.py``. Killed, it goes on bit for bit.

The data is a text that the script makes. The validation is a function at the top of the body, the next batch is drawn in
advance, gradients are accumulated by hand, and the learning rate is a function of the iteration.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainbus import Bus, CheckpointHook, LoggerHook, Run

MAX_ITERS, EVAL_INTERVAL, EVAL_ITERS, ACCUMULATE, BATCH, BLOCK, WIDTH = 60, 20, 4, 2, 8, 16, 32
RATE, WARMUP, MIN_RATE, CLIP = 1e-2, 5, 1e-3, 1.0

TEXT = " ".join(f"{number} plus {number % 7} is {number + number % 7}." for number in range(200))
LETTERS = sorted(set(TEXT))
DATA = torch.tensor([LETTERS.index(one) for one in TEXT])
SPLITS = {"train": DATA[: int(0.9 * len(DATA))], "val": DATA[int(0.9 * len(DATA)) :]}


class GPT(nn.Module):
    """One block of a transformer."""

    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.block(self.letters(x) + self.places.weight[: x.shape[1]], src_mask=mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def get_batch(split):
    data = SPLITS[split]
    starts = torch.randint(len(data) - BLOCK, (BATCH,))
    return tuple(torch.stack([data[at + shift : at + shift + BLOCK] for at in starts]) for shift in (0, 1))


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = {split: sum(model(*get_batch(split)).item() for _ in range(EVAL_ITERS)) / EVAL_ITERS for split in SPLITS}
    model.train()
    return losses


def get_lr(iteration):
    if iteration < WARMUP:
        return RATE * (iteration + 1) / WARMUP
    return MIN_RATE + 0.5 * (1 + math.cos(math.pi * (iteration - WARMUP) / (MAX_ITERS - WARMUP))) * (RATE - MIN_RATE)


def train(work_dir, hooks=(), resume="auto"):
    """Train, and return the model and the best loss of a validation."""
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    bus = Bus(CheckpointHook(interval=EVAL_INTERVAL, by_epoch=False), LoggerHook(), *hooks)
    with Run(bus, model=model, optimizer=optimizer, work_dir=work_dir, resume=resume) as run:
        kept = run.keep(batch=get_batch("train"), best_val_loss=1e9)
        for _ in run.epochs(max_iters=MAX_ITERS):
            for iteration in run.train(range(MAX_ITERS)):
                for group in optimizer.param_groups:
                    group["lr"] = get_lr(iteration)
                if iteration % EVAL_INTERVAL == 0:
                    losses = estimate_loss(model)
                    kept.best_val_loss = min(kept.best_val_loss, losses["val"])
                    run.report(val_loss=losses["val"])
                for _ in range(ACCUMULATE):
                    loss = model(*kept.batch) / ACCUMULATE
                    kept.batch = get_batch("train")  # in advance, while the device is busy
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                run.report(loss=loss * ACCUMULATE)
    return model, kept.best_val_loss


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for more
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tiny_gpt"))
