"""A loop with Accelerate, which saves by ``save_state``, by itself and with a bus."""

import logging
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.save_job import SaveJob
from benchmarks.trainers import Way


def save(job: SaveJob) -> None:
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # It removes the oldest one before it saves, so a limit of one would leave none for a while.
    naming = ProjectConfiguration(str(job.directory), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
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
SAVERS = {"Accelerate": Way(save, PATH, read)}
