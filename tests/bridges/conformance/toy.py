"""The trainer of the page "Write a bridge", whose bridge ``register_host`` makes known."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest.mock import patch

from trainbus import attach
from trainbus.eventloop import Bus
from trainbus.testing import host_job as job

EXAMPLES = Path(__file__).parents[3] / "examples"
with patch.object(sys, "path", [str(EXAMPLES), str(EXAMPLES / "plain"), *sys.path]):
    BRIDGE = importlib.import_module("toy_bridge")
TRAINER = importlib.import_module("toy_trainer")


class Saves:
    """Saves after so many batches, as a user of the trainer would write it."""

    def __init__(self, trainer, path, every):
        self.trainer, self.path, self.every = trainer, path, every

    def on_batch_end(self, loss):
        if self.trainer.step % self.every == 0:
            self.trainer.save(self.path)


class Job(job.HostJob):
    resumes_without_bus = stops_itself = evaluates = times_callbacks = window_ends_with_epoch = False
    missing = BRIDGE.ToyBridge.missing
    validates = accumulates = False

    def make(self):
        super().make()
        self.data = list(job.loader(self.batches))
        self.trainer = TRAINER.Trainer(self.net, self.optimizer, job.Net.loss, epochs=self.epochs)

    def attach(self, bus: Bus):
        self.bridge = attach(bus, self.trainer, work_dir=self.folder)
        return self.bridge

    def fit(self, resume=None):
        if self.every:
            self.trainer.callbacks.append(Saves(self.trainer, self.own(), self.every))
        self.trainer.fit(self.data, resume=resume)

    def own(self):
        return self.folder / "own.pt"

    def parts(self):
        return [*super().parts(), {"callbacks": list(self.trainer.callbacks)}]
