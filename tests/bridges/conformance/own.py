"""``TrainLoop``."""

from __future__ import annotations

from eventloop import TrainLoop
from eventloop.checkpoint import load
from hooks import OptimizerHook

from . import job


class Job(job.Job):
    suffix = ".safetensors"
    attaches = saves = False

    def make(self):
        super().make()
        self.data, self.val_data = job.loader(self.batches), job.loader(1, seed=2)
        if self.bus is not None and self.accumulate > 1:
            self.bus.add(OptimizerHook(accumulate=self.accumulate))

    def fit(self, resume=None):
        if self.bus is None:
            plain(self)
        else:
            self.loop().run(resume=resume)

    def evaluate(self):
        return self.loop().val()

    def loop(self):
        val = self.val_data if self.validate else None
        options = {"train_data": self.data, "val_data": val, "max_epochs": self.epochs, "work_dir": self.folder, "sanity": 0}
        return TrainLoop(self.model, self.optimizer, step=lambda model, batch: model.loss(batch), bus=self.bus, **options)

    def stored(self, path):
        return load(path)["state_dict"]


def plain(job):
    """Train as TrainLoop does, by hand."""
    for _ in range(job.epochs):
        for number, batch in enumerate(job.data, 1):
            (job.net.loss(batch) / job.accumulate).backward()
            if number % job.accumulate == 0:
                job.optimizer.step()
                job.optimizer.zero_grad()
        if job.validate:
            job.look_at(job.val_data)
