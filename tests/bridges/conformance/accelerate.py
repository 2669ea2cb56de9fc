"""A loop with Accelerate in ``run.train()``."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from eventloop import Run

from . import body


class Job(body.Job):
    accumulates = saves = True

    def make(self):
        super().make()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.trainer = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulate)
        parts = self.net, self.optimizer, self.data, self.val_data
        self.model, self.optimizer, self.data, self.val_data = self.trainer.prepare(*parts)

    def learn(self, batch):
        with self.trainer.accumulate(self.model):
            loss = self.net.loss(batch)
            self.trainer.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def run(self, resume):
        own = resume is not None and resume.is_dir()
        run = Run(
            self.bus, model=self.model, optimizer=self.optimizer, accelerator=self.trainer, work_dir=self.folder,
            resume=None if own else resume,
        )  # fmt: skip
        if own:
            self.trainer.load_state(resume)
        return run

    def learned(self, run):
        if self.every and (run.progress.iter + 1) % self.every == 0:
            self.trainer.save_state(self.own())

    def own(self):
        return self.folder / "own"
