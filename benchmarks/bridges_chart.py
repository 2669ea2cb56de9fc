"""Draw the microseconds that a bus adds to an iteration of other trainers."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import chart
from benchmarks.amounts import amount
from benchmarks.bridge_figures import LIMIT, Added, BridgeFigures, signed
from benchmarks.chart import FLOOR_BAR, PEER_BAR, SUBJECT_BAR
from benchmarks.harness import SUBJECT
from benchmarks.panels import LIGHT, finish, stacked

WIDTH, ROW, TITLE, FOOT = 8.0, 0.25, 0.5, 0.6  # inches


def draw(results: Sequence[BridgeFigures], environment: Mapping[str, object], path: Path) -> None:
    (result,) = results
    rows = list(result.rows())
    panels = [[row for row in rows if row.trainer == trainer] for trainer in result.samples]
    heights = [ROW * len(panel) + TITLE for panel in panels]
    reach = 1.25 * max(max(row.median, row.quartiles[1]) for row in rows)
    with stacked(heights, legend(environment), path, width=WIDTH, foot=FOOT) as drawn:
        for axes, panel in zip(drawn, panels, strict=True):
            draw_panel(axes, panel, reach)


def draw_panel(axes: Axes, rows: Sequence[Added], reach: float) -> None:
    for place, row in enumerate(rows):
        colour = SUBJECT_BAR if row.name == SUBJECT else LIGHT if row.name.startswith(SUBJECT) else PEER_BAR
        axes.barh(place, row.median, height=0.7, color=colour)
        axes.plot(row.quartiles, [place, place], color=FLOOR_BAR, linewidth=1)
        spot, weight = max(row.median, row.quartiles[1], 0), "bold" if row.name == SUBJECT else "normal"
        text = f"{signed(row.median)} µs"
        axes.annotate(text, (spot, place), (5, 0), textcoords="offset points", va="center", weight=weight)
    axes.set_xlim(min(0, *(row.quartiles[0] for row in rows)), reach)
    title = f"{rows[0].trainer}: added to an iteration of {amount(rows[0].alone, 'µs')} µs"
    finish(axes, title, [row.name for row in rows], LIMIT, bold=[row.name == SUBJECT for row in rows])


def legend(environment: Mapping[str, object]) -> str:
    marks = (
        "Medians of the differences to the trainer alone, with their quartiles; "
        f"dashed: the budget of {amount(LIMIT, 'µs')} µs for a bus without subscribers."
    )
    return textwrap.fill(f"{marks} {chart.machine(environment)}", chart.FOOTNOTE_COLUMNS)
