"""Draw the share of an iteration that measuring adds, by profiler."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import chart
from benchmarks.amounts import amount
from benchmarks.bridge_figures import signed
from benchmarks.bridges_chart import FOOT, ROW, TITLE, WIDTH
from benchmarks.chart import FLOOR_BAR, PEER_BAR, SUBJECT_BAR
from benchmarks.cost_figures import LIMIT, CostFigures, Overhead
from benchmarks.harness import SUBJECT
from benchmarks.panels import LIGHT, finish, stacked


def draw(results: Sequence[CostFigures], environment: Mapping[str, object], path: Path) -> None:
    heights = [ROW * len(list(result.rows())) + TITLE for result in results]
    with stacked(heights, legend(environment), path, width=WIDTH, foot=FOOT) as panels:
        for axes, result in zip(panels, results, strict=True):
            draw_panel(axes, result)


def draw_panel(axes: Axes, result: CostFigures) -> None:
    rows = list(result.rows())
    for place, row in enumerate(rows):
        colour = SUBJECT_BAR if row.name == SUBJECT else LIGHT if row.name.startswith(SUBJECT) else PEER_BAR
        axes.barh(place, row.share, height=0.7, color=colour)
        axes.plot(row.quartiles, [place, place], color=FLOOR_BAR, linewidth=1)
        spot, weight = max(row.share, row.quartiles[1], 0), "bold" if row.name == SUBJECT else "normal"
        axes.annotate(label(row), (spot, place), (5, 0), textcoords="offset points", va="center", weight=weight)
    axes.set_xlim(min(0, *(row.quartiles[0] for row in rows)), 1.7 * max(max(row.share, row.quartiles[1]) for row in rows))
    names, bold = [name(row) for row in rows], [row.name == SUBJECT for row in rows]
    finish(axes, f"{result.title} to an iteration", names, LIMIT, bold=bold)


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
