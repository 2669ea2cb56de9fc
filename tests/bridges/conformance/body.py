"""A loop of one's own in ``run.train()``."""

from __future__ import annotations

from trainbus.eventloop import Run
from trainbus.eventloop.checkpoint import load
from trainbus.testing import host_job as job

INSIDE = "your body makes it"


class Job(job.HostJob):
    resumes_without_bus = moves_files = stops_itself = evaluates = times_callbacks = window_ends_with_epoch = False
    suffix = ".safetensors"
    missing = dict.fromkeys(("before_forward", "after_forward", "before_backward", "after_backward"), INSIDE)
    attaches = saves = accumulates = knows_validations = False

    def make(self):
        super().make()
        self.data, self.val_data = job.loader(self.batches), job.loader(1, seed=2)

    def learn(self, batch):
        """Take a step as a user writes it; return the loss."""
        loss = self.net.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self, resume=None):
        if self.bus is None:
            for _ in range(self.epochs):
                for batch in self.data:
                    self.learn(batch)
                    self.learned()
                if self.validate:
                    self.look_at(self.val_data)
            return
        with self.run(resume) as run:
            for _ in run.epochs(self.epochs):
                for batch in run.train(self.data):
                    run.report(loss=self.learn(batch))
                    self.learned(run)
                if self.validate:
                    for batch in run.validate(self.val_data):
                        run.report(loss=self.net.loss(batch))

    def run(self, resume):
        return Run(self.bus, model=self.model, optimizer=self.optimizer, work_dir=self.folder, resume=resume)

    def learned(self, run=None):
        """Is called at the end of the body."""

    def evaluate(self):
        with self.run(None) as run:
            for batch in run.validate(self.val_data):
                run.report(loss=(loss := self.net.loss(batch)))
        return {"loss": loss}

    def stored(self, path):
        return load(path)["state_dict"]
