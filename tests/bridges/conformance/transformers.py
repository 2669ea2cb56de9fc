"""A ``transformers.Trainer``: models from configurations, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from trainbus import Bus, attach
from trainbus.bridges.transformers.host import TransformersBridge
from trainbus.testing import host_job as job


class WithLoss(nn.Module):
    """Takes no part in the trainer's scaling of losses, unlike the models of the library."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        y = self.net(x).flatten()
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Plain(WithLoss):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)))


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
        attach(bus, trainer)
    return trainer


class Job(job.HostJob):
    stops_at_begin = keeps_rate = takes_schedules = False
    suffix = ""
    repeats_epoch_end = knows_validations = False
    missing = TransformersBridge.missing
    continues = 'trainer.train(resume_from_checkpoint="{}")'

    def make(self):
        self.model = WithLoss(self.net)
        data, val = (
            [{"x": x, "labels": y} for x, y in job.samples(count, seed)] for count, seed in ((self.batches, 1), (1, 2))
        )
        options = {"num_train_epochs": self.epochs, "gradient_accumulation_steps": self.accumulate}
        options |= {"eval_strategy": "epoch" if self.validate else "no"}
        if self.every:
            options |= {"save_strategy": "epoch" if self.ends else "steps", "save_steps": self.every // self.accumulate}
        options |= {"save_total_limit": 1} if self.beside else {}
        self.trainer = make(self.folder, model=lambda: self.model, data=data, options={"eval_dataset": val}, **options)

    def attach(self, bus):
        self.bridge = attach(bus, self.trainer, checkpoints=self.beside)
        return self.bridge

    def attach_saver(self):
        attach(Bus(), self.trainer, checkpoints=True)

    def fit(self, resume=None):
        self.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))

    def call(self, slow):
        self.trainer.add_callback(type("Slow", (transformers.TrainerCallback,), {"on_step_end": slow}))
        return "Slow.on_step_end"

    def stop_itself(self):
        self.trainer.control.should_training_stop = True

    def evaluate(self):
        return {"loss": self.trainer.evaluate()["eval_loss"]}

    def own(self):
        return Path(get_last_checkpoint(str(self.folder)))

    def kept(self):
        return sorted(int(path.name.partition("-")[2]) for path in self.folder.glob("checkpoint-*"))

    def stored(self, path):
        return load_file(path / "model.safetensors")

    def files(self):
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())

    def parts(self):
        return [*super().parts(), dict(vars(self.trainer.callback_handler))]
