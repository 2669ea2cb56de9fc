"""One picture a benchmark: how many times the floor, on a log scale, with the figures beside the bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import SUBJECT, TIMES, Comparison, Row
from benchmarks.report import amount

INK, MUTED, RULE = "#1f2328", "#656d76", "#d8dee4"
SUBJECT_BAR, FLOOR_BAR, PEER_BAR = "#0969da", "#57606a", "#c2c9d1"
PANEL_WIDTH, BAR_HEIGHT, MARGIN = 6.2, 0.30, 1.25


def draw(comparisons: Sequence[Comparison], environment: Mapping[str, object], path: Path) -> None:
    bars = max(len(comparison.rows()) for comparison in comparisons)
    size = (PANEL_WIDTH * len(comparisons), BAR_HEIGHT * bars + MARGIN)
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 10, "text.color": INK}):
        figure = Figure(figsize=size, dpi=160, facecolor="white", layout="constrained")
        for axes, comparison in zip(figure.subplots(1, len(comparisons), squeeze=False)[0], comparisons, strict=True):
            panel(axes, comparison)
        figure.text(0.005, 0.005, footnote(environment), fontsize=7.5, color=MUTED, va="bottom")
        figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95), wspace=0.04)
        figure.savefig(path)


def panel(axes: Axes, comparison: Comparison) -> None:
    rows = sorted(comparison.rows(), key=lambda row: row.ratio)
    places = range(len(rows))
    # A log axis has no zero to grow from: the bars start a little below the floor, so that the floor is visible too.
    start = 0.8
    lengths = [row.ratio - start for row in rows]
    axes.barh(places, lengths, left=start, height=0.68, color=[colour(row, comparison) for row in rows])
    for place, row in zip(places, rows, strict=True):
        label(axes, place, row, comparison)
    axes.axvline(1, color=FLOOR_BAR, linewidth=0.8, zorder=0)
    if comparison.budget is not None:
        budget_line(axes, comparison.budget.limit)
    decorate(axes, rows, comparison)
    axes.set_xscale("log")
    axes.set_xlim(start, max(row.ratio for row in rows) ** 1.35 * 1.5)


def colour(row: Row, comparison: Comparison) -> str:
    return {SUBJECT: SUBJECT_BAR, comparison.floor: FLOOR_BAR}.get(row.name, PEER_BAR)


def label(axes: Axes, place: int, row: Row, comparison: Comparison) -> None:
    sign = "+" if comparison.baseline else ""
    digits = 2 if row.ratio < 10 else 1 if row.ratio < 100 else 0
    text = f"{row.ratio:.{digits}f} {TIMES}   {sign}{amount(row.median, comparison.unit)} {comparison.unit}"
    weight = "bold" if row.name == SUBJECT else "normal"
    axes.annotate(text, (row.ratio, place), (5, 0), textcoords="offset points", va="center", fontsize=9, weight=weight)


def budget_line(axes: Axes, limit: float) -> None:
    axes.axvline(limit, color=SUBJECT_BAR, linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    transform = axes.get_xaxis_transform()
    style = {"va": "top", "fontsize": 8, "color": SUBJECT_BAR}
    goal = f"goal ≤ {limit:.2f} {TIMES}"
    axes.annotate(goal, (limit, 0), (3, -4), xycoords=transform, textcoords="offset points", **style)


def decorate(axes: Axes, rows: Sequence[Row], comparison: Comparison) -> None:
    axes.set_title(comparison.title, loc="left", fontsize=10.5, weight="bold", color=INK)
    names = [f"{row.name} (floor)" if row.name == comparison.floor else row.name for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9.5)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_weight("bold" if row.name == SUBJECT else "normal")
        tick.set_color(INK)
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)


def footnote(environment: Mapping[str, object]) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in environment["libraries"].items())
    machine = f"{environment['cpu']}, {environment['cores']} cores, {environment['python']}"
    return f"times the floor, log scale; {machine} · {versions}"
