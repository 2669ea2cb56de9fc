"""A trainer in the shape of minGPT's: ``python examples/callback_trainer.py``. Killed, it goes on bit for bit.

It has callbacks and a ``while True`` loop, whose lines stay where they are. It learns which of four numbers is the largest.
"""

import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainbus import Bus, CheckpointHook, LoggerHook, PreemptionHook, Run

MAX_ITERS, REPORT_EACH = 200, 50


class Trainer:
    """Train for ``max_iters`` batches, and call callbacks after each of them."""

    def __init__(self, run, loader, max_iters):
        self.tb, self.model, self.optimizer = run, run.model, run.optimizers["optimizer"]
        self.loader, self.max_iters = loader, max_iters
        self.callbacks = defaultdict(list)

    def add_callback(self, moment, callback):
        self.callbacks[moment].append(callback)

    def trigger_callbacks(self, moment):
        for callback in self.callbacks[moment]:
            callback(self)

    def run(self):
        drive = self.tb.drive()
        drive.begin_train(max_iters=self.max_iters)
        self.iter_num = self.tb.progress.iter  # not 0 in a resumed run
        data_iter = iter(drive.begin_epoch(self.loader, endless=True))  # begins the loader anew at its end
        while True:
            if self.iter_num >= self.max_iters or drive.should_stop():
                break
            batch = next(data_iter)
            drive.begin_iteration(batch)
            inputs, targets = batch
            self.loss = cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            drive.end_iteration({"loss": self.loss})
            self.iter_num += 1
            self.trigger_callbacks("on_batch_end")
        if drive.should_stop():
            drive.abandon_epoch()  # a resumed run continues in it
        else:
            drive.end_epoch()
        drive.end_train()


def train(work_dir, hooks=()):
    """Train, and return the model and the last loss that the callback has seen."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bus = Bus(CheckpointHook(interval=20, by_epoch=False), LoggerHook(interval=REPORT_EACH), PreemptionHook(), *hooks)
    with Run(bus, model=model, optimizer=optimizer, work_dir=work_dir, seed=0, resume="auto") as run:
        kept = run.keep(loss=0.0)

        def report(trainer):
            if trainer.iter_num % REPORT_EACH == 0:
                kept.loss = trainer.loss.item()
                print(f"iteration {trainer.iter_num}: loss {kept.loss:.3f}")

        trainer = Trainer(run, loader, MAX_ITERS)
        trainer.add_callback("on_batch_end", report)
        trainer.run()
    return model, kept.loss


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/callback_trainer"))
