"""Ignite's Engine, with its Checkpoint handler over its own DiskSaver and ours."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.checkpoint import BaseSaveHandler
from torch import Tensor

from benchmarks.harness import SUBJECT
from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way
from benchmarks.trainers.job import Batch, Job
from trainbus import attach
from trainbus.bridges.ignite.saver import TrainbusSaver
from trainbus.eventloop import Bus


def engine(job: Job) -> Engine:
    model, optimizer = job.model, job.optimizer

    def update(engine: Engine, batch: Batch) -> Tensor:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Engine(update)


def train_with(job: Job, *, callback: bool = False, bus: Bus | None = None) -> None:
    """Train with two empty handlers, with a bus, or with none of them."""
    trainer = engine(job)
    if callback:
        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED):
            trainer.add_event_handler(event, lambda engine: None)
    if bus is not None:
        attach(bus, trainer, work_dir=job.directory)
    trainer.run(job.loader())


def save(saver: Callable[[Path, Engine], BaseSaveHandler], job: SaveJob) -> None:
    trainer = engine(job)
    to_save = {"model": job.model, "optimizer": job.optimizer, "trainer": trainer}
    checkpoint = Checkpoint(to_save, saver(job.directory, trainer), n_saved=1)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.interval), checkpoint)
    trainer.run(job.loader())


def read(path: Path) -> Mapping[str, Tensor]:
    return torch.load(path, mmap=True)["model"]


PATH = "checkpoint_{step}.pt"
SAVERS = {
    "Ignite": Way(partial(save, lambda directory, trainer: DiskSaver(directory)), PATH, read),
    f"{SUBJECT} in Ignite": Way(partial(save, TrainbusSaver), PATH, read),
}
