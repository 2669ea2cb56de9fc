"""One picture of several panels, one below the other, with a footnote."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.chart import INK, MUTED

GOAL = "#1a7f37"
LIGHT = "#80b6f4"  # of trainbus with something to do


@contextmanager
def stacked(heights: Sequence[float], footnote: str, path: Path, *, width: float, foot: float) -> Iterator[Iterator[Axes]]:
    """Give the panels to draw in, then write the picture; ``heights``, ``width`` and ``foot`` are inches."""
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(width, sum(heights) + foot), dpi=200, facecolor="white")
        figure.set_layout_engine("constrained")
        yield figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).flat
        share = foot / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0.01, share, 0.98, 0.99 - share), hspace=0.06)
        figure.text(0.01, share * 0.15, footnote, fontsize=6.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def finish(axes: Axes, title: str, names: Sequence[str], goal: float, *, bold: Sequence[bool]) -> None:
    """Add the title, the names of the bars and a line at the goal; leave out what else there is of axes."""
    axes.axvline(goal, color=GOAL, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    axes.set_yticks(range(len(names)), names)
    for tick, heavy in zip(axes.get_yticklabels(), bold, strict=True):
        tick.set(weight="bold" if heavy else "normal", color=INK)
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[:].set_visible(False)
