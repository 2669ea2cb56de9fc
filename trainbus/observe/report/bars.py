"""Lay out the costs of runs as bars that add up to 100 %, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from trainbus.eventloop.bus.titles import without_method
from trainbus.observe.costs import Costs, Part

_COLOURED: Final = 7  # parts with a colour; the eighth colour is for all others


class CostRow(NamedTuple):
    """A part of the costs in each run; None in a run without it. ``colour`` is 1 to 8."""

    name: str
    group: str
    mount_point: str
    parts: list[Part | None]
    colour: int


class BarPiece(NamedTuple):
    """A piece of a bar; ``begin`` and ``width`` are in percent."""

    name: str
    colour: int
    begin: float
    width: float


class Bars(NamedTuple):
    """The bars of runs and the rows of their table. A run without costs has an empty bar."""

    rows: list[CostRow]
    segments: list[list[BarPiece]]
    walls: list[float]


def cost_bars(all_costs: Sequence[Costs | None]) -> Bars:
    """Return the bars of runs in common colours, ordered by the largest share of a part in any run."""
    keys: dict[tuple[str, str, str], list[Part | None]] = {}
    for index, costs in enumerate(all_costs):
        for part in costs.parts if costs is not None else ():
            keys.setdefault((part.group, part.name, part.mount_point), [None] * len(all_costs))[index] = part
    ordered = sorted(keys.items(), key=lambda one: -max(part.share for part in one[1] if part is not None))
    rows = [
        CostRow(without_method(name, [mount_point]), group, mount_point, parts, min(index, _COLOURED) + 1)
        for index, ((group, name, mount_point), parts) in enumerate(ordered)
    ]
    segments = [_segments(rows, index) if costs is not None else [] for index, costs in enumerate(all_costs)]
    return Bars(rows, segments, [0.0 if costs is None else costs.wall for costs in all_costs])


def _segments(rows: Sequence[CostRow], index: int) -> list[BarPiece]:
    """Return the pieces of one bar. Shares are scaled to fill it, even if the remainder is below zero."""
    shares = [max(0.0, part.share) if (part := row.parts[index]) is not None else 0.0 for row in rows]
    named = [*((row.name, row.colour, share) for row, share in zip(rows, shares, strict=True))][:_COLOURED]
    others = len(shares) - _COLOURED
    if others > 0:
        named.append((f"{others} other parts", _COLOURED + 1, sum(shares[_COLOURED:])))
    whole, begin, found = sum(shares) or 1.0, 0.0, []
    for name, colour, share in named:
        found.append(BarPiece(name, colour, begin, 100 * share / whole))
        begin += 100 * share / whole
    return found
