"""Plain PyTorch: the bare loop, the floor, and the usual hand-written loop, which blocks for every feature."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.digits import MOMENTUM, Batch, Job
from benchmarks.peers import Logged, Resume, Saver, Statement, Trained

CHECKPOINTS = "*.pth"
SCALARS = "scalars.jsonl"


def epochs(job: Job) -> Iterator[Batch]:
    """Yield the batches of every epoch. As a generator it costs 0.1 µs per batch."""
    loader = job.loader()
    for _ in range(job.epochs):
        yield from loader


def train_bare(job: Job, work_dir: Path) -> None:
    """Train without features: forward, backward, optimizer step."""
    optimizer = job.optimizer()
    for batch in epochs(job):
        loss = job.loss(job.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_floor(job: Job, work_dir: Path) -> None:
    """The bare loop with the arithmetic of the average and of the schedule itself, inline."""
    optimizer = job.optimizer()
    scheduler = job.scheduler(optimizer)
    weights = [parameter.detach() for parameter in job.model.parameters()]
    average = [weight.clone() for weight in weights]
    for batch in epochs(job):
        loss = job.loss(job.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(average, weights, MOMENTUM)
        scheduler.step()


def train(job: Job, work_dir: Path, batches: Callable[[Job], Iterator[Batch]] = epochs) -> None:
    """Train with every feature, each where it is due."""
    optimizer = job.optimizer()
    scheduler = job.scheduler(optimizer)
    weights = [parameter.detach() for parameter in job.model.parameters()]
    average = [weight.clone() for weight in weights]
    with (work_dir / SCALARS).open("w") as scalars:
        for iteration, batch in enumerate(batches(job), start=1):
            loss = job.loss(job.model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._foreach_lerp_(average, weights, MOMENTUM)
            line = {"iter": iteration, "loss": loss.item(), "lr": scheduler.get_last_lr()[0]}
            scalars.write(json.dumps(line) + "\n")
            scheduler.step()
            if iteration % job.checkpoint_interval == 0:
                checkpoint = {
                    "model": job.model.state_dict(),
                    "average": average,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "iter": iteration,
                }
                torch.save(checkpoint, work_dir / f"iter_{iteration}.pth")


def weights(path: Path) -> Iterable[Tensor]:
    return torch.load(path)["model"].values()


@contextmanager
def savers(model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    """Save by torch.save into a file that is then synced."""
    weights = model.state_dict()

    def save(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())

    yield Saver(save, lambda path: torch.load(path).values())


SAVERS = {"torch.save + fsync": savers}


def save_both(trained: Trained, path: Path) -> None:
    model, optimizer = trained
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def resume(trained: Trained, path: Path) -> None:
    model, optimizer = trained
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


RESUMES = {"torch.load + load_state_dict": Resume(save_both, resume)}


@contextmanager
def logs(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
    """Log a line of JSON through Python's logging."""
    handler = logging.FileHandler(work_dir / SCALARS)
    logger = logging.Logger("scalars", logging.INFO)
    logger.addHandler(handler)
    code = 'info(dumps({"step": 7, **{name: float(value) for name, value in scalars.items()}}))'
    yield Logged(Statement(code, {"info": logger.info, "dumps": json.dumps, "scalars": scalars}))
    handler.close()


LOGS = {"logging + JSON": logs}
