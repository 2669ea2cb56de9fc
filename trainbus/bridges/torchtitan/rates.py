"""The learning rates that ``run.set_lr()`` sets, in the schedules of a torchtitan ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainbus.eventloop.log import get_logger

log = get_logger()


class Rates:
    """Scale torchtitan's schedules. They compute each rate anew from the configured one, and save nothing but their step."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = schedulers
        self._configured = [list(one.base_lrs) for one in schedulers]
        self.factors = [[1.0] * len(one.base_lrs) for one in schedulers]
        """By which the rest of each schedule is scaled, for each group of parameters; belongs in checkpoints."""

    def around(self, set_new: Callable[[], None]) -> None:
        """Set the new rates with ``set_new``, and scale the rest of the schedules."""
        before = [[float(group["lr"]) for group in one.optimizer.param_groups] for one in self._schedulers]
        set_new()
        for factors, rates, scheduler in zip(self.factors, before, self._schedulers, strict=True):
            for place, (old, group) in enumerate(zip(rates, scheduler.optimizer.param_groups, strict=True)):
                new = float(group["lr"])
                if new != old and not old:
                    log.warning(
                        "the schedule's rate is 0 now, so run.set_lr() cannot scale its later rates",
                        id="torchtitan-rate-not-scaled",
                        lr=new,
                    )
                elif new != old:
                    factors[place] *= new / old
        self.restore(self.factors)

    def restore(self, factors: Sequence[Sequence[float]]) -> None:
        """Scale the schedules by the factors of a checkpoint."""
        self.factors = [list(one) for one in factors]
        for scheduler, configured, own in zip(self._schedulers, self._configured, self.factors, strict=True):
            scheduler.base_lrs = [rate * factor for rate, factor in zip(configured, own, strict=True)]
