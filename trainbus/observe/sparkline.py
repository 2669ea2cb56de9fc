"""The last lines that a command prints about a run, with a ``Sparkline``: a curve in one line of a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.terminal import cell, printable
from trainbus.observe.curves import Curve
from trainbus.observe.run_folder import RunFolder, RunFolderError, is_run
from trainbus.observe.verdict import expensive

WIDTH: Final = 80  # columns at most
_LEVELS, _PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"


class Sparkline:
    """A curve to print: its name, the first value, bars, and the last value, in one line of at most 80 columns.

    A bar is the mean of its values; one without a finite value is a space. A terminal without block characters gets plain ones.

    Args:
        name: name of the curve.
        values: its values in order, at least one.
    """

    def __init__(self, name: str, values: Sequence[float]) -> None:
        self.name = name
        self.values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, tail = f"{printable(self.name)} {self.values[0]:.4g} ", f" {self.values[-1]:.4g}"
        room = min(WIDTH, options.max_width) - len(head) - len(tail)
        levels = _PLAIN_LEVELS if options.ascii_only else _LEVELS
        line = Text.assemble(head, (bars(self.values, max(room, 1), levels), "cyan"), tail)
        line.truncate(options.max_width)
        yield line


def bars(values: Sequence[float], width: int, levels: str = _LEVELS) -> str:
    """Return at most ``width`` characters, each for the mean of a part of the values."""
    edges = [round(index * len(values) / min(width, len(values))) for index in range(min(width, len(values)) + 1)]
    means = [_mean(values[begin:end]) for begin, end in pairwise(edges)]
    finite = [one for one in means if one is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    half = high / 2 - low / 2  # the whole may be more than the largest float
    heights = [None if one is None else (one / 2 - low / 2) / (half or 1.0) for one in means]
    return "".join(" " if one is None else levels[round(one * (len(levels) - 1))] for one in heights)


def main_curve(curves: Mapping[str, Curve]) -> Sparkline | None:
    """Return the curve of the main scalar of a run; None if there is none.

    It is the training's loss, or the first scalar named like a loss, or else the first metric of the validations.
    """
    name = min(curves, key=_rank, default="")  # the first of several equally good names
    return Sparkline(name, curves[name].values.tolist()) if _rank(name) < _NO_CURVE else None


_NO_CURVE: Final = 3


def _rank(name: str) -> int:
    stage = name.partition("/")[0]
    return 0 if name == "train/loss" else 1 if stage == "train" and "loss" in name else 2 if stage == "val" else _NO_CURVE


def _mean(values: Sequence[float]) -> float | None:
    finite = [one for one in values if isfinite(one)]
    return sum(one / len(finite) for one in finite) if finite else None


def last_lines(folder: Path, bus: Bus) -> Group:
    """Return the lines to print: the curve of the run, and its three most expensive parts as far as they matter.

    Args:
        folder: the work dir; without scalars in it, the curve is left out.
        bus: the bus of the run; without ``bus.timing``, costs are left out.
    """
    lines: list[RenderableType] = []
    try:
        curve = main_curve(RunFolder(folder).curves()) if is_run(folder) else None
    except RunFolderError as error:
        lines.append(cell(f"no curve: {error}"))
    else:
        lines += [] if curve is None else [curve]
    if bus.timing:
        lines += map(cell, expensive(bus.costs()))
    return Group(*lines)
