"""A loop with Accelerate, which saves by ``save_state``, by itself and with a bus."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness import SUBJECT
from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way
from benchmarks.trainers.job import Job
from trainbus.bridges import attach
from trainbus.eventloop import Bus, Run


def train_with(job: Job, *, bus: Bus | None = None) -> None:
    """Train with or without a bus; an own loop has no callbacks."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    with ExitStack() as scopes:
        epochs, batches = range(1), lambda: loader
        if bus is not None:
            directory = {"work_dir": job.directory}
            run = scopes.enter_context(Run(bus, model=model, optimizer=optimizer, accelerator=accelerator, **directory))
            epochs, batches = run.epochs(1), lambda: run.train(loader)
        for _ in epochs:
            for batch in batches():
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if bus is not None:
                    run.report(loss=loss)


def save(job: SaveJob, *, beside: bool = False) -> None:
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # It removes the oldest one before it saves, so a limit of one would leave none for a while.
    naming = ProjectConfiguration(str(job.directory), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    if beside:
        attach(Bus(), accelerator, checkpoints=True)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    for step, batch in enumerate(loader, 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step % job.interval == 0:
            accelerator.save_state()


def read(path: Path) -> Mapping[str, Tensor]:
    return load_file(path / "model.safetensors")


PATH = "checkpoints/checkpoint_{number}"
SAVERS = {"Accelerate": Way(save, PATH, read), f"{SUBJECT} in Accelerate": Way(partial(save, beside=True), PATH, read)}
