"""An own loop: the ways to save that need no trainer."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.harness import SUBJECT
from benchmarks.peers.distributed import group
from benchmarks.save_job import SaveJob
from benchmarks.saving import remove
from benchmarks.trainers import Way
from trainbus.eventloop.checkpoint import AsyncSaver, load


def train(job: SaveJob, save: Callable[[dict[str, object], int], object]) -> None:
    for step in range(1, job.steps + 1):
        job.model(**job.batch)["loss"].backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        if step % job.interval == 0:
            save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, step)


def torch_save(job: SaveJob) -> None:
    def save(state: dict[str, object], step: int) -> None:
        torch.save(state, job.directory / f"{step}.pt")
        (job.directory / f"{step - job.interval}.pt").unlink(missing_ok=True)

    train(job, save)


def dcp_async(job: SaveJob) -> None:
    def save(state: dict[str, object], step: int) -> None:
        part, whole = job.directory / f"{step}.part", job.directory / str(step)
        future = dcp.async_save(state, checkpoint_id=part)
        future.add_done_callback(partial(complete, part, whole, job.directory / str(step - job.interval)))

    with group():
        train(job, save)


def complete(part: Path, whole: Path, previous: Path, _: Future[object]) -> None:
    """Rename a complete checkpoint, because DCP does not mark it, and remove the previous one."""
    part.rename(whole)
    if previous.exists():
        remove(previous)


def read_dcp(path: Path) -> Mapping[str, Tensor]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in metadata if name.startswith("model.")]
    weights = {name.removeprefix("model."): torch.empty(metadata[name].size) for name in names}
    dcp.load({"model": weights}, checkpoint_id=path)
    return weights


def trainbus(job: SaveJob) -> None:
    with AsyncSaver() as saver:

        def save(state: dict[str, object], step: int) -> None:
            future = saver.save(state, job.directory / f"{step}.safetensors")
            previous = job.directory / f"{step - job.interval}.safetensors"
            future.add_done_callback(lambda _: previous.unlink(missing_ok=True))

        train(job, save)


SAVERS = {
    "torch.save": Way(torch_save, "{step}.pt", lambda path: torch.load(path, mmap=True)["model"]),
    "DCP async_save": Way(dcp_async, "{step}", read_dcp),
    f"{SUBJECT} in an own loop": Way(trainbus, "{step}.safetensors", lambda path: load(path)["model"]),
}
