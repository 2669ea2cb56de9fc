"""Engines of Ignite."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("ignite")

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss
from torch import nn

from trainbus import TrainbusSaver, attach
from trainbus.bridges.ignite.host import IgniteBridge
from trainbus.testing import host_job as job

logging.getLogger("ignite").setLevel(logging.CRITICAL)


class Job(job.HostJob):
    passes_stop_iteration = resumes_at_end = window_ends_with_epoch = False
    missing = IgniteBridge.missing
    repeats_epoch_end = empty_epochs = False
    continues = 'Checkpoint.load_objects(bridge.to_save, "{}")'

    def make(self, *, deterministic=True):
        super().make()
        loss = nn.MSELoss()
        self.trainer = create_supervised_trainer(
            self.net, self.optimizer, loss, deterministic=deterministic, gradient_accumulation_steps=self.accumulate
        )
        self.evaluator = create_supervised_evaluator(self.net, {"loss": Loss(loss)})
        self.to_save = {"model": self.net, "optimizer": self.optimizer, "trainer": self.trainer}
        self.data = list(job.loader(self.batches))
        if self.validate:
            self.trainer.add_event_handler(Events.EPOCH_COMPLETED, self.evaluate)

    def attach(self, bus):
        self.bridge = attach(bus, self.trainer, evaluator=self.evaluator if self.validate else None, work_dir=self.folder)
        self.to_save = self.bridge.to_save
        return self.bridge

    def fit(self, resume=None):
        if resume is not None:  # the engine of this kind saves states of NumPy
            saved = torch.load(resume, weights_only=False)
            Checkpoint.load_objects({name: self.to_save[name] for name in saved}, saved)
        if self.every:
            saver = TrainbusSaver(self.folder / "own", self.trainer) if self.beside else DiskSaver(self.folder / "own")
            self.saver = Checkpoint(self.to_save, saver)
            self.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=self.every), self.saver)
        self.trainer.run(self.data, max_epochs=self.epochs)

    def call(self, slow):
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, slow)
        return "slow.ITERATION_COMPLETED"

    def stop_itself(self):
        self.trainer.terminate()

    def evaluate(self):
        return self.evaluator.run(list(job.loader(1, seed=2))).metrics

    def own(self):
        return self.folder / "own" / f"checkpoint_{self.kept()[-1]}.pt"

    def kept(self):
        return sorted(int(path.stem.partition("_")[2]) for path in self.folder.glob("own/checkpoint_*.pt"))

    def parts(self):
        engines = self.trainer, self.evaluator
        handlers = [{event: list(called) for event, called in one._event_handlers.items() if called} for one in engines]
        return [*(dict(vars(engine)) for engine in engines), *handlers]
