"""``last_lines``: the last lines that a command prints about a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType

from eventloop.bus import Bus
from eventloop.observe.run_folder import RunFolder, RunFolderError, is_run
from eventloop.observe.sparkline import main_curve
from eventloop.observe.verdict import expensive
from eventloop.terminal import cell


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
