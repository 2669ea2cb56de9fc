"""One picture a benchmark: how many times the floor, on a log scale, with the figures beside the bars."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import SUBJECT, TIMES, Comparison, Row
from benchmarks.report import amount, goal

INK, MUTED = "#1f2328", "#656d76"
SUBJECT_BAR, FLOOR_BAR, PEER_BAR = "#0969da", "#57606a", "#c9d1d9"

# Inches; at the 8 inches that a README shows without scaling down, 9 points stay readable.
WIDTH, BAR_PITCH, TITLE_HEIGHT, FOOTNOTE_HEIGHT = 8.0, 0.25, 0.55, 0.5
FOOTNOTE_COLUMNS = 150


def draw(comparisons: Sequence[Comparison], environment: Mapping[str, object], path: Path) -> None:
    heights = [BAR_PITCH * len(comparison.rows()) + TITLE_HEIGHT for comparison in comparisons]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(WIDTH, sum(heights) + FOOTNOTE_HEIGHT), dpi=200, facecolor="white")
        figure.set_layout_engine("constrained")
        panels = figure.subplots(len(comparisons), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
        for axes, comparison in zip(panels, comparisons, strict=True):
            panel(axes, comparison)
        panels[0].set_xscale("log")
        panels[0].set_xlim(*limits(comparisons))
        share = FOOTNOTE_HEIGHT / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0, share, 1, 0.99 - share), hspace=0.06)
        figure.text(0.01, share * 0.2, footnote(environment), fontsize=6.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def limits(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """A log axis has no zero to grow from: bars start a little below the floor, so that the floor can be seen too."""
    ratios = [row.ratio for comparison in comparisons for row in comparison.rows()]
    low = 0.8 * min(ratios)
    # The longest bar leaves two fifths of the width to its label.
    return low, max(ratios) * (max(ratios) / low) ** 0.4


def panel(axes: Axes, comparison: Comparison) -> None:
    rows = sorted(comparison.rows(), key=lambda row: row.ratio)
    colours = [{SUBJECT: SUBJECT_BAR, comparison.floor: FLOOR_BAR}.get(row.name, PEER_BAR) for row in rows]
    axes.barh(range(len(rows)), [row.ratio for row in rows], height=0.7, color=colours)
    axes.axvline(1, color=FLOOR_BAR, linewidth=0.7, zorder=0)
    for place, row in enumerate(rows):
        weight = "bold" if row.name == SUBJECT else "normal"
        text = label(row, comparison)
        axes.annotate(text, (row.ratio, place), (5, 0), textcoords="offset points", va="center", weight=weight)
    axes.set_title(comparison.title, loc="left", fontsize=10, weight="bold")
    name_rows(axes, rows, comparison.floor)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.spines[:].set_visible(False)


def label(row: Row, comparison: Comparison) -> str:
    decimals = 2 if row.ratio < 10 else 1 if row.ratio < 100 else 0
    sign = "+" if comparison.baseline else ""
    text = f"{row.ratio:.{decimals}f} {TIMES}   {sign}{amount(row.median, comparison.unit)} {comparison.unit}"
    if row.name == SUBJECT and comparison.budget is not None:
        text += f"   (goal ≤ {goal(comparison)}{'' if comparison.budget.seconds else f' {TIMES}'})"
    return text


def name_rows(axes: Axes, rows: Sequence[Row], floor: str) -> None:
    names = [f"{row.name} (floor)" if row.name == floor else row.name for row in rows]
    axes.set_yticks(range(len(rows)), names)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(weight="bold" if row.name == SUBJECT else "normal", color=INK)
    axes.tick_params(which="both", left=False, bottom=False, labelbottom=False)


def footnote(environment: Mapping[str, object]) -> str:
    machine = f"{environment['cpu']}, {environment['cores']} cores, {environment['python']}"
    versions = " · ".join(f"{name} {version}" for name, version in environment["libraries"].items())
    return textwrap.fill(f"Bars: times the floor, log scale, median. {machine} · {versions}", FOOTNOTE_COLUMNS)
