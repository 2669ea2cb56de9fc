"""Plain PyTorch: the bare loop, the floor, and the loop most people write first, which blocks for every feature."""

import json
from pathlib import Path

import torch

from benchmarks.digits import CHECKPOINT_INTERVAL, MOMENTUM, Job

CHECKPOINTS = "*.pth"
SCALARS = "scalars.jsonl"


def train_bare(job: Job, work_dir: Path) -> None:
    """No feature at all: forward, backward, optimizer step."""
    optimizer = job.optimizer()
    for batch in job.loader():
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
    for batch in job.loader():
        loss = job.loss(job.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(average, weights, MOMENTUM)
        scheduler.step()


def train(job: Job, work_dir: Path) -> None:
    """Every feature, each where it is due."""
    optimizer = job.optimizer()
    scheduler = job.scheduler(optimizer)
    weights = [parameter.detach() for parameter in job.model.parameters()]
    average = [weight.clone() for weight in weights]
    with (work_dir / SCALARS).open("w") as scalars:
        for iteration, batch in enumerate(job.loader(), start=1):
            loss = job.loss(job.model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._foreach_lerp_(average, weights, MOMENTUM)
            line = {"iter": iteration, "loss": loss.item(), "lr": scheduler.get_last_lr()[0]}
            scalars.write(json.dumps(line) + "\n")
            scheduler.step()
            if iteration % CHECKPOINT_INTERVAL == 0:
                checkpoint = {
                    "model": job.model.state_dict(),
                    "average": average,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "iter": iteration,
                }
                torch.save(checkpoint, work_dir / f"iter_{iteration}.pth")
