"""The times of ranks side by side, and the straggler among them: what a record has of them (see ``straggler``)."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import msgspec
from rich.console import Group

from trainbus.eventloop import notebook
from trainbus.eventloop.bounds import Count, Number
from trainbus.eventloop.terminal import Figures, cell, plain


class Spent(msgspec.Struct, frozen=True):
    """The times of one rank: seconds of the training thread by group and name, and the number of iterations."""

    host: str
    iterations: int
    parts: dict[str, dict[str, float]]

    def since(self, before: Spent) -> Spent:
        """Return the times since ``before``, an earlier state."""
        parts = {
            group: {name: seconds - before.parts.get(group, {}).get(name, 0.0) for name, seconds in named.items()}
            for group, named in self.parts.items()
        }
        return Spent(self.host, self.iterations - before.iterations, parts)


def spent_here(iterations: int, spent: Iterable[tuple[str, str, float]]) -> Spent:
    """Return the times of this process from groups, names and seconds; equal names are added up."""
    parts: dict[str, dict[str, float]] = {}
    for group, name, seconds in spent:
        named = parts.setdefault(group, {})
        named[name] = named.get(name, 0.0) + seconds
    return Spent(socket.gethostname(), iterations, parts)


class RankTimes(msgspec.Struct, frozen=True):
    """One part of an iteration on all ranks, in seconds per iteration, and the rank and host that take longest."""

    group: str
    name: str
    min: Number
    median: Number
    max: Number
    rank: Count
    host: str


class Straggler(msgspec.Struct, frozen=True):
    """A rank that the others wait for. Times are seconds per iteration."""

    rank: Count
    host: str
    group: str
    name: str
    """The part that it is slow at, as in :class:`Part`: "waiting for data", "forward" or the name of a hook."""
    seconds: Number
    """Time of this part on the straggler."""
    others: Number
    """Median time of this part on the other ranks."""
    waited: Number
    """Time that the other ranks wait for the straggler."""


class RankCosts(msgspec.Struct, frozen=True):
    """The times of all ranks side by side. Print it, or read ``times``, which has the whole iteration first."""

    world_size: Count
    iterations: Count
    """Iterations that were compared; the smallest number of all ranks."""
    seconds: Number
    """Mean time of an iteration; the median of the ranks."""
    times: list[RankTimes]
    straggler: Straggler | None = None
    missing: list[Count] = []
    """Ranks without times: they do not measure, or stopped reporting."""

    def __rich__(self) -> Group:
        return Group(*(one if isinstance(one, Figures) else cell(one) for one in self.blocks()))

    def __repr__(self) -> str:
        return plain(self)

    def _repr_html_(self) -> str:
        return notebook.blocks(*self.blocks())

    def blocks(self) -> list[Figures | str]:
        """Return the table, and the lines below it."""
        rows = [
            (one.name, *(f"{seconds * 1e3:.3f}" for seconds in (one.min, one.median, one.max)), f"rank {one.rank} ({one.host})")
            for one in self.times
        ]
        table = Figures(f"{self.world_size} ranks, ms an iteration", ("part", "min", "median", "max", "slowest"), rows)
        slow, missing = self.straggler, ", ".join(map(str, self.missing))
        lines = [f"The other ranks wait for rank {slow.rank}: {slow_at(slow)}"] if slow is not None else []
        lines += [f"Not measured: rank {missing}"] if missing else []
        return [table, *lines]


def slow_at(slow: Straggler) -> str:
    """Describe in words what a straggler is slow at."""
    part = f"{'handing over to ' * (slow.group == 'hand-off')}{slow.name}"
    return f"{part} takes {slow.seconds * 1e3:.3g} ms an iteration there, {slow.others * 1e3:.3g} ms on the others"
