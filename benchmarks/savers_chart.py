"""Draw checkpoints in other trainers: the stall, and the time until the file is durable, on one axis."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import chart
from benchmarks.amounts import amount
from benchmarks.chart import INK, MUTED, PEER_BAR, SUBJECT_BAR
from benchmarks.harness import SUBJECT, TIMES
from benchmarks.save_figures import LIMIT, SaverFigures

DURABLE, GOAL = "#d4711b", "#1a7f37"
WIDTH, ROW, TITLE, FOOT = 9.5, 0.27, 0.6, 0.75  # inches


def draw(results: Sequence[SaverFigures], environment: Mapping[str, object], path: Path) -> None:
    heights = [ROW * len(result.rows()) + TITLE for result in results]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=200, facecolor="white")
        figure.set_layout_engine("constrained")
        for axes, result in zip(
            figure.subplots(len(results), 1, squeeze=False, height_ratios=heights).flat, results, strict=True
        ):
            panel(axes, result)
        share = FOOT / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0.01, share, 0.98, 0.99 - share), hspace=0.06)
        figure.text(0.01, share * 0.15, legend(environment), fontsize=6.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def panel(axes: Axes, result: SaverFigures) -> None:
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
    axes.axvline(copy * LIMIT, color=GOAL, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_title(f"{result.title}: what it adds to a step", loc="left", fontsize=10, weight="bold")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(weight="bold" if row.name.startswith(SUBJECT) else "normal", color=INK)
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[:].set_visible(False)


def legend(environment: Mapping[str, object]) -> str:
    marks = (
        "Bars: the worst step around a save less the median step, and that over one copy of the same tensors; "
        f"dashed: {LIMIT} {TIMES} the copy; diamond: durable. Log scale; medians."
    )
    return textwrap.fill(f"{marks} {chart.machine(environment)}", chart.FOOTNOTE_COLUMNS)
