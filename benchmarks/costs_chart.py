"""Draw the share of an iteration that measuring adds, by profiler."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import chart
from benchmarks.amounts import amount
from benchmarks.bridge_figures import signed
from benchmarks.bridges_chart import FOOT, GOAL, LIGHT, ROW, TITLE, WIDTH
from benchmarks.chart import FLOOR_BAR, INK, MUTED, PEER_BAR, SUBJECT_BAR
from benchmarks.cost_figures import LIMIT, CostFigures, Overhead
from benchmarks.harness import SUBJECT


def draw(results: Sequence[CostFigures], environment: Mapping[str, object], path: Path) -> None:
    heights = [ROW * len(list(result.rows())) + TITLE for result in results]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=200, facecolor="white")
        figure.set_layout_engine("constrained")
        for axes, result in zip(
            figure.subplots(len(results), 1, squeeze=False, height_ratios=heights).flat, results, strict=True
        ):
            draw_panel(axes, result)
        share = FOOT / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0.01, share, 0.98, 0.99 - share), hspace=0.06)
        figure.text(0.01, share * 0.15, legend(environment), fontsize=6.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def draw_panel(axes: Axes, result: CostFigures) -> None:
    rows = list(result.rows())
    for place, row in enumerate(rows):
        colour = SUBJECT_BAR if row.name == SUBJECT else LIGHT if row.name.startswith(SUBJECT) else PEER_BAR
        axes.barh(place, row.share, height=0.7, color=colour)
        axes.plot(row.quartiles, [place, place], color=FLOOR_BAR, linewidth=1)
        spot, weight = max(row.share, row.quartiles[1], 0), "bold" if row.name == SUBJECT else "normal"
        axes.annotate(label(row), (spot, place), (5, 0), textcoords="offset points", va="center", weight=weight)
    axes.set_xlim(min(0, *(row.quartiles[0] for row in rows)), 1.7 * max(max(row.share, row.quartiles[1]) for row in rows))
    axes.axvline(LIMIT, color=GOAL, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_title(f"{result.title} to an iteration", loc="left", fontsize=10, weight="bold")
    axes.set_yticks(range(len(rows)), [name(row) for row in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(weight="bold" if row.name == SUBJECT else "normal", color=INK)
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[:].set_visible(False)


def name(row: Overhead) -> str:
    return row.name if row.name.startswith((SUBJECT, "TraceML")) else f"{row.system} {row.name}"


def label(row: Overhead) -> str:
    return f"{row.share:+.1%}   {signed(row.median)} µs of {amount(row.alone, 'µs')}"


def legend(environment: Mapping[str, object]) -> str:
    marks = (
        "Medians of what a profiler adds to its own system's loop with the same features on, with their quartiles; "
        f"dashed: {LIMIT:.0%}, the recorder's budget for a step of 1 ms."
    )
    return textwrap.fill(f"{marks} {chart.machine(environment)}", chart.FOOTNOTE_COLUMNS)
