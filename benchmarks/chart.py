"""Draw one chart per benchmark: multiples of the floor on a log scale, with the figures beside the bars."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.amounts import amount, goal
from benchmarks.harness import SUBJECT, TIMES, Comparison, Row

INK, MUTED = "#1f2328", "#656d76"
SUBJECT_BAR, FLOOR_BAR, PEER_BAR = "#0969da", "#57606a", "#c9d1d9"

# Inches; at the 8 inches that a README shows without scaling down, 9 points stay readable.
WIDTH, BAR_PITCH, TITLE_HEIGHT, FOOTNOTE_HEIGHT = 8.0, 0.25, 0.55, 0.5
FOOTNOTE_COLUMNS = 150
FEW, WIDE = 4, 14.0  # with more panels than this, the chart has two columns
TITLE_COLUMNS = 52
NEXT_TO_NOTHING = 0.05  # times the floor


def draw(comparisons: Sequence[Comparison], environment: Mapping[str, object], path: Path) -> None:
    columns = 1 if len(comparisons) <= FEW else 2
    rows = [comparisons[first : first + columns] for first in range(0, len(comparisons), columns)]
    heights = [BAR_PITCH * max(len(each.rows()) for each in row) + TITLE_HEIGHT for row in rows]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        size = (WIDTH if columns == 1 else WIDE, sum(heights) + FOOTNOTE_HEIGHT)
        figure = Figure(figsize=size, dpi=200 if columns == 1 else 150, facecolor="white")
        figure.set_layout_engine("constrained")
        panels = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for place, comparison in enumerate(comparisons):
            axes = panels[divmod(place, columns)]
            panel(axes, comparison)
            scale(axes, comparisons if columns == 1 else [comparison])
            axes.set_ylim(max(len(each.rows()) for each in rows[place // columns]) - 0.5, -0.6)  # bars of one height
        for axes in panels.flat[len(comparisons) :]:
            axes.set_axis_off()
        share = FOOTNOTE_HEIGHT / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0.01, share, 0.98, 0.99 - share), hspace=0.06)
        figure.text(0.01, share * 0.2, footnote(environment), fontsize=6.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def scale(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Set the scale of the axis. A log axis has no zero, so bars start a little below the floor, which stays visible.

    Values near zero or below it (differences of two times) need a linear axis.
    """
    ratios = [row.ratio for comparison in comparisons for row in comparison.rows()]
    if min(ratios) < NEXT_TO_NOTHING:
        axes.set_xlim(min(0, *ratios), max(ratios) * 1.8)
        return
    low = 0.8 * min(ratios)
    axes.set_xscale("log")
    # The label of the longest bar gets two fifths of the bar's length, or all of it if there are remarks.
    room = 1.0 if any(comparison.remarks for comparison in comparisons) else 0.4
    axes.set_xlim(low, max(ratios) * (max(ratios) / low) ** room)


def panel(axes: Axes, comparison: Comparison) -> None:
    rows = sorted(comparison.rows(), key=lambda row: row.ratio)
    colours = [{SUBJECT: SUBJECT_BAR, comparison.floor: FLOOR_BAR}.get(row.name, PEER_BAR) for row in rows]
    axes.barh(range(len(rows)), [row.ratio for row in rows], height=0.7, color=colours)
    axes.axvline(1, color=FLOOR_BAR, linewidth=0.7, zorder=0)
    for place, row in enumerate(rows):
        weight = "bold" if row.name == SUBJECT else "normal"
        text = label(row, comparison)
        axes.annotate(text, (max(row.ratio, 0), place), (5, 0), textcoords="offset points", va="center", weight=weight)
    axes.set_title(textwrap.fill(comparison.title, TITLE_COLUMNS), loc="left", fontsize=10, weight="bold")
    name_rows(axes, rows, comparison.floor)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.spines[:].set_visible(False)


def label(row: Row, comparison: Comparison) -> str:
    decimals = 2 if row.ratio < 10 else 1 if row.ratio < 100 else 0
    sign = "+" if comparison.baseline and row.median >= 0 else ""
    text = f"{row.ratio:.{decimals}f} {TIMES}   {sign}{amount(row.median, comparison.unit)} {comparison.unit}"
    if row.name == SUBJECT and comparison.budget is not None:
        text += f"   (goal ≤ {goal(comparison)}{'' if comparison.budget.seconds else f' {TIMES}'})"
    remark = comparison.remarks.get(row.name)
    return f"{text}   {remark}" if remark else text


def name_rows(axes: Axes, rows: Sequence[Row], floor: str) -> None:
    names = [f"{row.name} (floor)" if row.name == floor else row.name for row in rows]
    axes.set_yticks(range(len(rows)), names)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(weight="bold" if row.name == SUBJECT else "normal", color=INK)
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)


def footnote(environment: Mapping[str, object]) -> str:
    axis = "log scale, linear where bars come near to zero"
    return textwrap.fill(f"Bars: times the floor, {axis}; median. {machine(environment)}", FOOTNOTE_COLUMNS)


def machine(environment: Mapping[str, object]) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in environment["libraries"].items())
    return f"{environment['cpu']}, {environment['cores']} cores, {environment['python']} · {versions}"
