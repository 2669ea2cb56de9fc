"""Lightning's Trainer, with ModelCheckpoint over its own plugins and ours."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from torch import Tensor

from benchmarks.harness import SUBJECT
from benchmarks.peers.lightning import QUIET, hushed
from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way
from benchmarks.trainers.job import Batch, Job
from trainbus import attach
from trainbus.bridges.lightning.saver import TrainbusCheckpointIO
from trainbus.eventloop import Bus


class Module(LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.model
        self.optimizer = job.optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def train_with(job: Job, *, callback: bool = False, bus: Bus | None = None, **options: object) -> None:
    """Train with an empty callback, with a bus, or with neither."""
    callbacks = [Callback()] if callback else []
    with hushed():
        options = {"enable_checkpointing": False, "callbacks": callbacks, **options, **QUIET}
        trainer = Trainer(max_steps=job.steps, accelerator="cpu", logger=False, default_root_dir=job.directory, **options)
        if bus is not None:
            attach(bus, trainer)
        trainer.fit(Module(job), job.loader())


def save(plugin: type[CheckpointIO], job: SaveJob) -> None:
    keep_newest = ModelCheckpoint(job.directory, filename="{step}", every_n_train_steps=job.interval)
    train_with(job, enable_checkpointing=True, callbacks=[keep_newest], plugins=[plugin()])


def read(path: Path) -> Mapping[str, Tensor]:
    state = torch.load(path, mmap=True, weights_only=False)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


PATH = "step={step}.ckpt"
SAVERS = {
    "Lightning": Way(partial(save, TorchCheckpointIO), PATH, read),
    "Lightning, AsyncCheckpointIO": Way(partial(save, AsyncCheckpointIO), PATH, read),
    f"{SUBJECT} in Lightning": Way(partial(save, TrainbusCheckpointIO), PATH, read),
}
