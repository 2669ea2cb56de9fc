"""Lightning's trainer."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from trainbus.bridges import TrainbusCheckpointIO
from trainbus.bridges.lightning.host import LightningBridge
from trainbus.testing import host_job as job

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


def module_of(package):
    """Return the modules of a package: Lightning has two names."""

    class Module(package.LightningModule):
        def __init__(self, net=None):
            super().__init__()
            self.net = net or job.Net()

        def loss(self, batch):
            return self.net.loss(batch)

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch), sync_dist=True)
            return {"size": len(batch[0])}

        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.loss(batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module


Module = module_of(pl)


class Rest:
    """The batches of an epoch without the first ones, once: Lightning does not restore the position in the data."""

    def __init__(self, batches, skip):
        self.batches, self.skip = batches, skip

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in list(self.batches)[self.skip :]:
            self.skip = 0  # not earlier: Lightning makes an iterator only to see whether it can
            yield batch

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Job(job.HostJob):
    passes_stop_iteration = takes_schedules = False
    suffix = ".ckpt"
    metric = "val_loss"
    repeats_epoch_end = empty_epochs = False
    missing = LightningBridge.missing
    interrupts = (SystemExit, KeyboardInterrupt)
    continues = 'trainer.fit(..., ckpt_path="{}")'

    def make(self, **options):
        self.model = Module(self.net)
        saves = []
        if self.every:
            when = {"every_n_train_steps": self.every // self.accumulate}
            if self.ends:  # of an epoch, or of its validation
                when = {"every_n_epochs": self.every // self.batches, "save_on_train_epoch_end": not self.validate}
            saves += [ModelCheckpoint(self.folder, filename="own-{step}", **when)]
        plugins = [TrainbusCheckpointIO()] if self.beside else []
        self.trainer = pl.Trainer(
            accelerator="cpu", max_epochs=self.epochs, accumulate_grad_batches=self.accumulate, default_root_dir=self.folder,
            callbacks=saves, plugins=plugins, gradient_clip_val=0.5, **QUIET, **{"enable_checkpointing": bool(saves)} | options,
        )  # fmt: skip

    def fit(self, resume=None):
        skip = 0
        if resume is not None and (entry := torch.load(resume, weights_only=False)["callbacks"].get("trainbus")):
            skip = entry["progress"]["batches"] % self.batches
        data, val = job.loader(self.batches), job.loader(1, seed=2) if self.validate else None
        self.trainer.fit(self.model, Rest(data, skip) if skip else data, val, ckpt_path=resume)

    def again(self):
        self.trainer.fit_loop.max_epochs = self.trainer.current_epoch + self.epochs
        self.fit()

    def call(self, slow):
        self.trainer.callbacks.append(type("Slow", (pl.Callback,), {"on_train_batch_end": slow})())
        return "Slow.on_train_batch_end"

    def stop_itself(self):
        self.trainer.should_stop = True

    def evaluate(self):
        (metrics,) = self.trainer.validate(self.model, job.loader(1, seed=2), verbose=False)
        return metrics

    def own(self):
        return self.folder / f"own-step={self.kept()[-1]}.ckpt"

    def kept(self):
        return sorted(int(path.stem.partition("=")[2]) for path in self.folder.glob("own-step=*.ckpt"))

    def stored(self, path):
        return torch.load(path, weights_only=False)["state_dict"]

    def parts(self):
        return [*super().parts(), dict(vars(self.trainer.strategy)), {"callbacks": list(self.trainer.callbacks)}]
