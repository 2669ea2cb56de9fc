"""A loop with Accelerate in ``run.train()``."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from trainbus import Bus, attach
from trainbus.eventloop import Run
from trainbus.testing import host_job as job

from . import body


class Job(body.Job):
    accumulates = saves = moves_files = window_ends_with_epoch = True

    def make(self):
        super().make()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        project = ProjectConfiguration(str(self.folder), automatic_checkpoint_naming=True, total_limit=1)
        self.trainer = Accelerator(
            cpu=True, gradient_accumulation_steps=self.accumulate, project_config=project if self.beside else None
        )
        data = DataLoader(job.samples(self.batches), job.SIZE, shuffle=True)
        parts = self.net, self.optimizer, data, self.val_data
        self.model, self.optimizer, self.data, self.val_data = self.trainer.prepare(*parts)

    def learn(self, batch):
        with self.trainer.accumulate(self.model):
            loss = self.net.loss(batch)
            self.trainer.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def attach_saver(self):
        attach(Bus(), self.trainer, checkpoints=True)

    def fit(self, resume=None):
        self.step = 0
        try:
            super().fit(resume)
        finally:
            self.trainer.end_training()

    def run(self, resume):
        own = resume is not None and resume.is_dir()
        run = Run(
            self.bus, model=self.model, optimizer=self.optimizer, accelerator=self.trainer, work_dir=self.folder,
            resume=None if own else resume,
        )  # fmt: skip
        if own:
            self.trainer.load_state(resume)
        return run

    def learned(self, run=None):
        self.step += 1
        if self.every and self.step % self.every == 0:
            self.trainer.save_state(None if self.beside else self.own())

    def own(self):
        if not self.beside:
            return self.folder / "own"
        return self.folder / "checkpoints" / f"checkpoint_{self.kept()[-1] // self.every - 1}"

    def stored(self, path):
        return load_file(path / "model.safetensors") if path.is_dir() else super().stored(path)

    def kept(self):
        numbers = (int(path.name.partition("_")[2]) for path in self.folder.glob("checkpoints/checkpoint_*"))
        return sorted((number + 1) * self.every for number in numbers)
