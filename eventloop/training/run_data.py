"""``run.data`` and ``run.steps``: the data of a run, the steps of its optimizers; ``run.foreign``: what another trainer has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import torch

from trainbus.eventloop.events import Progress
from trainbus.eventloop.training.driver import Driver
from trainbus.eventloop.training.saves.contents import SavedRun


class RunData:
    """The data of a run: its loaders and their lengths."""

    def __init__(self, run: SavedRun, driver: Driver) -> None:
        self._run, self._driver = run, driver

    @property
    def train(self) -> Iterable[Any] | None:
        """The loader of the training; None before the first training epoch of your own loop."""
        loader: Iterable[Any] | None = self._run.host.train_data
        return loader

    @property
    def evaluation(self) -> Iterable[Any] | None:
        """The loader of the current or last validation or test; None before the first, and in another trainer."""
        feed = self._run.feeds.evaluated
        return None if feed is None else feed.loader

    @property
    def epoch_length(self) -> int | None:
        """Training batches per epoch; None if unknown."""
        length: int | None = self._run.host.epoch_length
        return length

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the current or last validation or test; None if unknown."""
        length: int | None = self._run.host.evaluation_length
        return length

    @property
    def total_iters(self) -> int | None:
        """Total iterations of the run; None if unknown."""
        counters = self._run.state.counters
        if counters.max_epochs is None or self.epoch_length is None:
            return counters.max_iters
        return counters.max_epochs * self.epoch_length

    @property
    def one_epoch(self) -> bool:
        """True if the training is one long epoch (``max_iters``, and data that begins again); known once the epoch begins."""
        feed = self._driver.feed
        return self._run.state.counters.max_iters is not None and feed is not None and feed.endless

    @property
    def last_batch(self) -> bool:
        """True if the current training batch is the last one of its epoch (or of an iteration-based run)."""
        return self._driver.last_batch


class RunSteps:
    """The steps of a run's optimizers in the current iteration."""

    def __init__(self, run: SavedRun) -> None:
        self._run = run

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how often an optimizer of the run has stepped in the current iteration."""
        return self._run.state.stepped.get(id(optimizer), 0)

    def between(self, call: Callable[[torch.optim.Optimizer, Progress], object]) -> None:
        """Call ``call(optimizer, progress)`` before an optimizer steps again in the same iteration, until the run ends.

        With ``after_train_iter`` a hook then sees the weights after each step, of a body that makes several steps, too.
        """
        if call not in self._run.state.between_steps:
            self._run.state.between_steps.append(call)

    @property
    def accumulation(self) -> int | None:
        """Iterations per step, from the update on the bus or the accelerator; None if your code decides."""
        accumulation: int | None = self._run.host.accumulation
        return accumulation


class Foreign(msgspec.Struct):
    """What another trainer, or the ``accelerator``, has; empty in your own loop."""

    schedulers: Collection[object] = ()
    """Learning-rate schedulers that it steps."""
    averages: Collection[str] = ()
    """Names of its parts that average the weights, too."""
    settings: Mapping[str, Any] = {}
    """Settings for the record: ``precision``, ``schedule``."""
