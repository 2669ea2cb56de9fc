"""``last_lines``: what a command prints when a run has ended."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from eventloop.bus import Bus
from eventloop.observe.run_folder import RunFolder, RunFolderError, is_run
from eventloop.observe.sparkline import main_curve
from eventloop.observe.verdict import expensive


def last_lines(folder: Path, bus: Bus) -> Group:
    """Return a line with the curve of the run, and a line for each of the three most expensive things, if they matter.

    Args:
        folder: the work dir; without scalars in it there is no curve.
        bus: of the run; if it does not measure (``bus.timing``), nothing is said of costs.
    """
    lines: list[RenderableType] = []
    try:
        curve = main_curve(RunFolder(folder).scalars()) if is_run(folder) else None
    except RunFolderError as error:
        lines.append(Text(f"no curve: {error}"))
    else:
        lines += [] if curve is None else [curve]
    if bus.timing:
        lines += map(Text, expensive(bus.costs()))
    return Group(*lines)
