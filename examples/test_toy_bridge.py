"""What ``toy_bridge.py`` keeps of what all bridges promise.

pytest examples/test_toy_bridge.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "plain"))
from toy_bridge import ToyBridge
from toy_trainer import Trainer

import trainbus
from trainbus.testing import HostChecks, HostJob
from trainbus.testing.host_job import Net, loader


class ToyJob(HostJob):
    missing = ToyBridge.missing
    validates = accumulates = evaluates = False
    resumes_without_bus = stops_itself = times_callbacks = False

    def make(self):
        super().make()
        self.data = list(loader(self.batches))
        self.trainer = Trainer(self.net, self.optimizer, Net.loss, epochs=self.epochs)

    def attach(self, bus):
        self.bridge = trainbus.attach(bus, self.trainer, work_dir=self.folder)
        return self.bridge

    def fit(self, resume=None):
        if self.every:
            self.trainer.callbacks.append(Saves(self.trainer, self.own(), self.every))
        self.trainer.fit(self.data, resume=resume)

    def own(self):
        return self.folder / "own.pt"

    def parts(self):
        return [*super().parts(), {"callbacks": list(self.trainer.callbacks)}]


class Saves:
    """Saves after so many batches, as a user of the trainer would write it."""

    def __init__(self, trainer, path, every):
        self.trainer, self.path, self.every = trainer, path, every

    def on_batch_end(self, loss):
        if self.trainer.step % self.every == 0:
            self.trainer.save(self.path)


class TestToyTrainer(HostChecks):
    job = ToyJob
