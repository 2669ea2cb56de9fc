"""Draw hand-offs: the cost for the publisher and the time until arrival on one axis, one panel per condition."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import chart
from benchmarks.chart import FLOOR_BAR, INK, MUTED, PEER_BAR, SUBJECT_BAR
from benchmarks.handoff import Figures, HandOffFigures, amount
from benchmarks.harness import SUBJECT, Comparison

ARRIVAL = "#d4711b"
PROMISE = "#1a7f37"

# Inches.
WIDTH, ROW, TITLE, FOOT = 13.0, 0.25, 0.65, 0.75
TICKS = {
    1e-8: "10 ns",
    1e-7: "0.1 µs",
    1e-6: "1 µs",
    1e-5: "10 µs",
    1e-4: "0.1 ms",
    1e-3: "1 ms",
    1e-2: "10 ms",
    1e-1: "0.1 s",
    1.0: "1 s",
}


def draw(results: Sequence[HandOffFigures | Comparison], environment: Mapping[str, object], path: Path) -> None:
    panels = [result for result in results if isinstance(result, HandOffFigures)]
    others = [result for result in results if isinstance(result, Comparison)]
    rows = -(-len(panels) // 2)
    heights = [ROW * len(panels[0].rounds) + TITLE] * rows + [ROW * len(other.rows()) + TITLE for other in others]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(WIDTH, sum(heights) + FOOT), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained")
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        limits = reach(panels)
        for number, result in enumerate(panels):
            panel(figure.add_subplot(grid[number // 2, number % 2]), result, limits)
        for number, result in enumerate(others):
            axes = figure.add_subplot(grid[rows + number, :])
            chart.panel(axes, result)
            axes.set_xlim(0, 1.6 * max(row.ratio for row in result.rows()))
        share = FOOT / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0, share, 1, 0.99 - share), hspace=0.04, wspace=0.02)
        figure.text(0.01, share * 0.15, legend(environment), fontsize=7.5, color=MUTED, va="bottom", linespacing=1.4)
        figure.savefig(path)


def reach(panels: Sequence[HandOffFigures]) -> tuple[float, float]:
    rows = [row for result in panels for row in result.rows()]
    return 0.6 * min(max(row.p50, 1e-8) for row in rows), 2 * max(row.delivery_p99 or row.p99 for row in rows)


def panel(axes: Axes, result: HandOffFigures, limits: tuple[float, float]) -> None:
    rows = result.rows()
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    for place, row in enumerate(rows):
        bar(axes, place, row, result, limits[0])
    if result.promise is not None:
        for limit in (result.promise.publisher, result.promise.delivery):
            axes.axvline(limit, color=PROMISE, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_title(result.title, loc="left", fontsize=10.5, weight="bold")
    chart.name_rows(axes, rows, result.floor)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_weight("bold" if row.name.startswith(SUBJECT) else "normal")
    ticks = {place: name for place, name in TICKS.items() if limits[0] <= place <= limits[1]}
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(list(ticks.values()))
    axes.tick_params(axis="x", labelbottom=True, labelsize=8, colors=MUTED)
    axes.grid(axis="x", color="#eaeef2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[:].set_visible(False)


def bar(axes: Axes, place: int, row: Figures, result: HandOffFigures, left: float) -> None:
    colour = SUBJECT_BAR if row.name.startswith(SUBJECT) else FLOOR_BAR if row.name == result.floor else PEER_BAR
    p50 = max(row.p50, left)
    axes.barh(place, p50 - left, left=left, height=0.66, color=colour)
    axes.plot([p50, max(row.p99, p50)], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot(max(row.p99, p50), place, marker="|", color=colour, markersize=7, markeredgewidth=1.6)
    if row.delivery_p50 is not None and row.delivery_p99 is not None:
        axes.plot([row.delivery_p50, row.delivery_p99], [place, place], color=ARRIVAL, linewidth=1.4)
        axes.plot(row.delivery_p50, place, marker="D", color=ARRIVAL, markersize=4.5)
        axes.plot(row.delivery_p99, place, marker="|", color=ARRIVAL, markersize=7, markeredgewidth=1.6)
    inside = p50 / left > 8
    text, ink = f"{amount(row.p50, 1e6)} µs", "white" if inside and colour != PEER_BAR else INK
    spot, offset, side = (left, 4, "left") if inside else (max(row.p99, p50), 7, "left")
    axes.annotate(text, (spot, place), (offset, 0), textcoords="offset points", va="center", ha=side, color=ink, fontsize=8.5)


def legend(environment: Mapping[str, object]) -> str:
    marks = (
        "Bar and figure: p50 of what a publish costs its thread, line to p99. Orange: until it arrives, p50 (diamond) to p99. "
        "Dashed: the budget for both. Log scale; medians over rounds."
    )
    return f"{marks}\n{textwrap.fill(chart.machine(environment), chart.FOOTNOTE_COLUMNS)}"
