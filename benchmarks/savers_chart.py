"""Draw checkpoints in trainers and stores: the stall, and the time until the file is durable, on one axis."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import chart
from benchmarks.amounts import amount
from benchmarks.chart import PEER_BAR, SUBJECT_BAR
from benchmarks.harness import SUBJECT, TIMES
from benchmarks.panels import finish, stacked
from benchmarks.save_figures import LIMIT, SaverFigures
from benchmarks.store_figures import StoreFigures

Figures = SaverFigures | StoreFigures

DURABLE = "#d4711b"
WIDTH, ROW, TITLE, FOOT = 9.5, 0.27, 0.6, 0.75  # inches


def draw(results: Sequence[Figures], environment: Mapping[str, object], path: Path) -> None:
    heights = [ROW * len(result.rows()) + TITLE for result in results]
    with stacked(heights, legend(results[0], environment), path, width=WIDTH, foot=FOOT) as panels:
        for axes, result in zip(panels, results, strict=True):
            panel(axes, result)


def panel(axes: Axes, result: Figures) -> None:
    rows = result.rows()
    copy = sum(row.copy for row in rows) / len(rows)
    left = 0.5 * min(copy, *(max(row.stall, copy / 10) for row in rows))
    longest = max(max(row.durable, row.stall) for row in rows)
    axes.set_xscale("log")
    axes.set_xlim(left, longest * (longest / left) ** 0.9)
    for place, row in enumerate(rows):
        ours = row.name.startswith(SUBJECT)
        axes.barh(place, max(row.stall - left, 0), left=left, height=0.7, color=SUBJECT_BAR if ours else PEER_BAR)
        axes.plot(row.durable, place, marker="D", color=DURABLE, markersize=4)
        text = f"{amount(row.stall, 'ms')} ms, {row.ratio:.2f} {TIMES}; durable after {amount(row.durable, 'ms')} ms"
        spot = max(row.durable, row.stall)
        axes.annotate(text, (spot, place), (7, 0), textcoords="offset points", va="center", weight="bold" if ours else "normal")
    names, bold = [row.name for row in rows], [row.name.startswith(SUBJECT) for row in rows]
    finish(axes, f"{result.title}: how long the training stands still", names, copy * LIMIT, bold=bold)


def legend(result: Figures, environment: Mapping[str, object]) -> str:
    marks = (
        f"Bars: {result.bars}, and that over one copy of the same tensors; "
        f"dashed: {LIMIT} {TIMES} the copy; diamond: durable. Log scale; medians."
    )
    return textwrap.fill(f"{marks} {chart.machine(environment)}", chart.FOOTNOTE_COLUMNS)
