"""``run.set_lr()`` in a ``transformers.Trainer``, whose schedule sets the learning rates at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eventloop.log import get_logger

log = get_logger()


def set_rates(trainer: Any, optimizer: torch.optim.Optimizer, set_new: Callable[[], None]) -> None:
    """Set the new rates with ``set_new``, and scale the rest of the trainer's schedule."""
    groups = optimizer.param_groups
    before = [float(group["lr"]) for group in groups]
    set_new()
    after = [float(group["lr"]) for group in groups]
    scheduler = trainer.lr_scheduler
    if before == after or not hasattr(scheduler, "base_lrs"):
        return
    if 0.0 in before:
        log.warning("the schedule's rate is 0 now, so run.set_lr() cannot scale its later rates", lr=after)
    bases = zip(scheduler.base_lrs, before, after, strict=True)
    scheduler.base_lrs = [base * new / old if old else base for base, old, new in bases]
