"""Lightning's Trainer, with ModelCheckpoint over its own plugins and ours."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from torch import Tensor

from benchmarks.peers.lightning import QUIET, hushed
from benchmarks.save_job import Batch, SaveJob
from benchmarks.trainers import Way


class Module(LightningModule):
    def __init__(self, job: SaveJob) -> None:
        super().__init__()
        self.net = job.model
        self.optimizer = job.optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def save(plugin: type[CheckpointIO], job: SaveJob) -> None:
    keep_newest = ModelCheckpoint(job.directory, filename="{step}", every_n_train_steps=job.interval)
    with hushed():
        trainer = Trainer(
            max_steps=job.steps, accelerator="cpu", logger=False, callbacks=[keep_newest], plugins=[plugin()], **QUIET
        )
        trainer.fit(Module(job), job.loader())


def read(path: Path) -> Mapping[str, Tensor]:
    state = torch.load(path, mmap=True, weights_only=False)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


PATH = "step={step}.ckpt"
SAVERS = {
    "Lightning": Way(partial(save, TorchCheckpointIO), PATH, read),
    "Lightning, AsyncCheckpointIO": Way(partial(save, AsyncCheckpointIO), PATH, read),
}
