"""Tiny trainings with a ``transformers.Trainer``: models from configurations, nothing is downloaded."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402


class Plain(nn.Module):
    """Takes no part in the trainer's scaling of losses, unlike the models of the library."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x, labels=None):
        y = self.inner(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


def plain_data(count=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator)
    return [{"x": one, "labels": one.sum()} for one in x]


def tokens(count=16):
    ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in ids]


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    )


def make(folder, bus=None, *, model=Plain, data=None, kind=Trainer, options=None, **arguments):
    """A trainer of 2 epochs with 8 batches of 2 samples, with the bus attached."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    data = data or (plain_data() if model is Plain else tokens())
    defaults = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    defaults |= {"save_strategy": "no", "logging_strategy": "no", "learning_rate": 1e-2, "disable_tqdm": True}
    defaults |= {"use_cpu": True, "report_to": [], "dataloader_pin_memory": False}
    trainer = kind(
        model(),
        TrainingArguments(str(folder), **(defaults | arguments)),
        train_dataset=data,
        **({"eval_dataset": plain_data(4) if model is Plain else tokens(4)} | (options or {})),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if bus is not None:
        bus.attach(trainer)
    return trainer
