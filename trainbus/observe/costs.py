"""``Costs``: where the time of a run went, to print or to read. Its parts add up to the wall time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from rich.console import Group, RenderableType

from trainbus.eventloop import notebook
from trainbus.eventloop.bounds import Change, Count, Number
from trainbus.eventloop.bus.titles import title, without_method
from trainbus.eventloop.terminal import Figures, plain
from trainbus.observe.ranks import RankCosts

BINS: Final = 8
"""Bins per doubling: quantiles are exact to 5 %."""
Bin = Annotated[int, msgspec.Meta(ge=0, le=64 * BINS)]


def quantile(counts: Mapping[int, int], share: float) -> float:
    """Return the duration in ns that ``share`` of the durations do not exceed, from their counts by bin; 0 without any."""
    wanted, seen = share * sum(counts.values()), 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= wanted:
            return float(2.0 ** ((index + 0.5) / BINS))
    return 0.0


class Durations(msgspec.Struct, frozen=True):
    """Counts of durations: ``counts[i]`` of those from ``2**(i / 8)`` ns on, below ``2**((i + 1) / 8)`` ns."""

    counts: dict[Bin, Count] = {}
    seconds: Number = 0.0
    """The sum of the durations."""

    @property
    def total(self) -> int:
        """The number of durations."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float:
        """Return the duration in seconds that ``share`` of them do not exceed, exact to 5 %; 0 if there are none."""
        return quantile(self.counts, share) / 1e9

    def since(self, before: Durations) -> Durations:
        """Return the counts added since ``before``, an earlier state of this histogram."""
        more = {index: number - before.counts.get(index, 0) for index, number in self.counts.items()}
        return Durations({index: number for index, number in more.items() if number}, self.seconds - before.seconds)


class Part(msgspec.Struct, frozen=True):
    """One line of the costs. ``seconds``, ``share``, ``mean`` and ``p99`` all leave out the parts within it."""

    group: str
    name: str
    calls: Count
    seconds: Number
    share: Number
    p99: Number = 0.0
    mount_point: str = ""

    @property
    def mean(self) -> float:
        """Seconds per call; 0 without calls."""
        return self.seconds / self.calls if self.calls else 0.0


class LaneCosts(msgspec.Struct, frozen=True):
    """The work of one offloaded handler. Times are seconds on its own threads; ``waited`` is the training thread's."""

    name: str
    mount_points: list[str]
    delivered: Count
    failed: Count
    dropped: Count
    pending: Count
    seconds: Number = 0.0
    """Time in the handler."""
    waited: Number = 0.0
    """Time that publishers waited for room in the full lane."""
    depth_mean: Number = 0.0
    depth_max: Count = 0
    age_mean: Number = 0.0
    """Time from publish to delivery."""
    age_max: Number = 0.0
    capacity: Count = 0
    """The number of events that may wait; 0 in records of earlier versions."""
    full: Literal["block", "drop_old", "drop_new", "latest", "raise"] = "block"
    """What happens to an event when so many wait."""


class Growth(msgspec.Struct, frozen=True):
    """Growth of memory in a window of time. ``name`` is the name of a hook, handler or step function, or "process"."""

    name: str
    bytes: Change
    """Growth within the window."""
    seconds: Number
    iterations: Count
    """Length of the window."""
    graphs: bool = False
    """True if more and more tensors are kept with their history of gradients, whose memory ``bytes`` leaves out."""


class Costs(msgspec.Struct, frozen=True):
    """Where the wall time of the training thread went, largest part first. The parts add up to ``wall``. Times are seconds.

    Print it, or read ``parts``.
    """

    wall: Number
    parts: list[Part]
    steps: Durations = Durations()
    """Durations of iterations, from the end of one to the end of the next; waiting for data included."""
    lanes: list[LaneCosts] = []
    memory: Count = 0
    """Resident memory of the process in bytes."""
    growth: list[Growth] = []
    dropped: Count = 0
    """Number of lost spans; their time is missing from the parts."""
    ranks: RankCosts | None = None
    """The comparison of all ranks; None with a single process and in the first two seconds."""

    def __rich__(self) -> RenderableType:
        ranks: list[RenderableType] = [] if self.ranks is None else ["", self.ranks]
        return Group(*self._blocks(), *ranks)

    def __str__(self) -> str:
        return plain(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return notebook.blocks(*self._blocks(), *([] if self.ranks is None else self.ranks.blocks()))

    def _blocks(self) -> list[Figures | str]:
        lost = f"{self.dropped} spans were lost; their time is missing from the parts"
        return [self._table(), *[_lanes_table(self.lanes)] * bool(self.lanes), *[lost] * bool(self.dropped)]

    def _table(self) -> Figures:
        rows = []
        for part in self.parts:
            if part.share >= _LEAST:
                each = (f"{part.mean * 1e3:.3f}", f"{part.p99 * 1e3:.3f}") if part.calls else ()
                rows.append((_titled(part), f"{part.share:.1%}", f"{part.seconds:.3f}", str(part.calls or ""), *each))
        others = [part for part in self.parts if part.share < _LEAST]
        if others:
            seconds = sum(part.seconds for part in others)
            rows.append((f"{len(others)} others", f"{seconds / max(self.wall, 1e-9):.1%}", f"{seconds:.3f}"))
        return Figures(f"Where {self.wall:.3g} s went", ("part", "share", "seconds", "calls", "mean ms", "p99 ms"), rows)


_LEAST: Final = 0.001  # share of the wall time above which a part gets its own line


def _titled(part: Part) -> str:
    if part.group == "waiting":
        return f"waiting for the full lane of {part.name}"
    name = title(part.name, part.mount_point) if part.mount_point else part.name
    return f"{name} (to its lane)" if part.group == "hand-off" else name


def _lanes_table(lanes: list[LaneCosts]) -> Figures:
    names = ("handler", "events", "lost", "seconds", "ms each", "waited s", "depth", "age ms")
    rows = []
    for lane in sorted(lanes, key=lambda one: -one.seconds):
        done = lane.delivered + lane.failed
        figures = (
            str(done),
            str(lane.dropped),
            f"{lane.seconds:.3f}",
            f"{lane.seconds / max(done, 1) * 1e3:.2f}",
            f"{lane.waited:.3f}",
            f"{lane.depth_mean:.0f} {lane.depth_max}",
            f"{lane.age_mean * 1e3:.0f} {lane.age_max * 1e3:.0f}",
        )
        rows.append((without_method(lane.name, lane.mount_points), *figures))
    return Figures("Offloaded handlers, beside the training (depth and age: mean and most)", names, rows)
