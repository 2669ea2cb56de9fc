"""Replica groups: copies of one training that die and come back one by one, led by a manager.

from trainbus.eventloop.training.saved_run import SavedRun

Each group is a run of its own. An iteration is one step of the manager: if the manager does not commit it, the same batch
comes again, and nothing is published or counted. A group that comes back takes over the state of one that went on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import numpy as np
import torch

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.loaders import start_persistent_workers
from trainbus.eventloop.training.rng import own_generators, random_states, reseed
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.schema import SavedStart

log = get_logger()


class Replicas(Protocol):
    """What a run asks the bridge of a manager of replica groups."""

    first: bool
    """True if this group saves: it was the first one in the last committed step."""
    healed: bool
    """True in an iteration in which this group took over the state of another one."""

    @property
    def name(self) -> str:
        """Name of this group, the same after a restart; ConfigurationError if the manager has none."""

    @property
    def size(self) -> int:
        """Number of processes in this group."""

    def join(self, run: SavedRun, drive: Any) -> None:
        """Lead a run, which ``drive`` drives."""

    def begin(self) -> None:
        """Begin the run: it has its ranks, and the state of its checkpoint."""

    def iteration_counts(self, *, complete: bool = True) -> bool:
        """Return True if the iteration that ends here counts; False if its batch must come again.

        ``complete`` is False if its body was left early.
        """


_PASS: Final = 0
_BATCH: Final = 1
_STEP: Final = 2


class Draws:
    """Random numbers that are a function of the seed, the pass over the data and the iteration.

    So a group that comes back, or repeats an iteration, draws the same numbers as one that did not stop.
    """

    def __init__(self, seed: int, step: Callable[[], int]) -> None:
        self._seed = seed
        self._step = step
        self._generators: dict[torch.Generator, int] = {}
        """The seeds that the program gave the generators of loaders."""

    def begin_pass(self, loader: Iterable[Any], number: int) -> SavedStart:
        """Seed a pass over a loader and the generators that it owns; return the states."""
        start_persistent_workers(loader)  # whether they run changes the draws of a pass
        self._seed_all(_PASS, number)
        for generator in dict.fromkeys(own_generators(loader)):
            if isinstance(generator, torch.Generator):
                seed = self._generators.setdefault(generator, generator.initial_seed())
                generator.manual_seed(_mixed(seed, _PASS, number))
        return random_states(loader)

    def before_batch(self, number: int, batch: int) -> None:
        """Seed the reading of a batch of a pass."""
        self._seed_all(_BATCH, number, batch)

    def before_step(self) -> None:
        """Seed the iteration that begins."""
        self._seed_all(_STEP, self._step())

    def _seed_all(self, *place: int) -> None:
        reseed(_mixed(self._seed, *place))


def _mixed(seed: int, *place: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, *place]).generate_state(1, np.uint64)[0])
