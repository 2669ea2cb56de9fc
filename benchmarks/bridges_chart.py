"""Draw the microseconds that a bus adds to an iteration of other trainers."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import chart
from benchmarks.amounts import amount
from benchmarks.bridge_figures import LIMIT, Added, BridgeFigures, signed
from benchmarks.chart import FLOOR_BAR, INK, MUTED, PEER_BAR, SUBJECT_BAR
from benchmarks.harness import SUBJECT

GOAL = "#1a7f37"
LIGHT = "#80b6f4"  # a bus with something to do
WIDTH, ROW, TITLE, FOOT = 8.0, 0.25, 0.5, 0.6  # inches


def draw(results: Sequence[BridgeFigures], environment: Mapping[str, object], path: Path) -> None:
    (result,) = results
    rows = list(result.rows())
    panels = [[row for row in rows if row.trainer == trainer] for trainer in result.samples]
    heights = [ROW * len(panel) + TITLE for panel in panels]
    reach = 1.25 * max(max(row.median, row.quartiles[1]) for row in rows)
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=200, facecolor="white")
        figure.set_layout_engine("constrained")
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat, panels, strict=True):
            draw_panel(axes, panel, reach)
        share = FOOT / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0.01, share, 0.98, 0.99 - share), hspace=0.06)
        figure.text(0.01, share * 0.15, legend(environment), fontsize=6.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def draw_panel(axes: Axes, rows: Sequence[Added], reach: float) -> None:
    for place, row in enumerate(rows):
        colour = SUBJECT_BAR if row.name == SUBJECT else LIGHT if row.name.startswith(SUBJECT) else PEER_BAR
        axes.barh(place, row.median, height=0.7, color=colour)
        axes.plot(row.quartiles, [place, place], color=FLOOR_BAR, linewidth=1)
        spot, weight = max(row.median, row.quartiles[1], 0), "bold" if row.name == SUBJECT else "normal"
        text = f"{signed(row.median)} µs"
        axes.annotate(text, (spot, place), (5, 0), textcoords="offset points", va="center", weight=weight)
    axes.set_xlim(min(0, *(row.quartiles[0] for row in rows)), reach)
    axes.axvline(LIMIT, color=GOAL, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    title = f"{rows[0].trainer}: added to an iteration of {amount(rows[0].alone, 'µs')} µs"
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(weight="bold" if row.name == SUBJECT else "normal", color=INK)
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[:].set_visible(False)


def legend(environment: Mapping[str, object]) -> str:
    marks = (
        "Medians of the differences to the trainer alone, with their quartiles; "
        f"dashed: the budget of {amount(LIMIT, 'µs')} µs for a bus without subscribers."
    )
    return textwrap.fill(f"{marks} {chart.machine(environment)}", chart.FOOTNOTE_COLUMNS)
