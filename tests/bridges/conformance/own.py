"""``TrainLoop``."""

from __future__ import annotations

from trainbus.eventloop import TrainLoop
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import OptimizerHook
from trainbus.testing import host_job as job


class Job(job.HostJob):
    steps_itself = passes_stop_iteration = resumes_without_bus = moves_files = stops_itself = evaluates = times_callbacks = (
        False
    )
    suffix = ".safetensors"
    attaches = saves = False

    def make(self):
        super().make()
        self.data, self.val_data = job.loader(self.batches), job.loader(1, seed=2)
        if self.bus is not None and self.accumulate > 1:
            self.bus.add(OptimizerHook(accumulate=self.accumulate))

    def fit(self, resume=None):
        if self.bus is not None:
            self.loop().run(resume=resume)
            return
        for _ in range(self.epochs):  # by hand, as TrainLoop does
            for number, batch in enumerate(self.data, 1):
                (self.net.loss(batch) / self.accumulate).backward()
                if number % self.accumulate == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if self.validate:
                self.look_at(self.val_data)

    def evaluate(self):
        return self.loop().validate()

    def loop(self):
        val = self.val_data if self.validate else None
        options = {"train_data": self.data, "val_data": val, "max_epochs": self.epochs, "work_dir": self.folder, "sanity": 0}
        return TrainLoop(self.model, self.optimizer, step=lambda model, batch: model.loss(batch), bus=self.bus, **options)

    def stored(self, path):
        return load(path)["state_dict"]
