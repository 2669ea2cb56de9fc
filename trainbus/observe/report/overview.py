"""Lay out several runs as one table of what differs and what came out, and as parallel coordinates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from trainbus.observe.compared import Row, differing, is_shown, metrics_of, settings_of, short_names
from trainbus.observe.curves import stage_and_name
from trainbus.observe.record import Evaluation
from trainbus.observe.report.facts import shortened, text_of
from trainbus.observe.report.reported_run import ReportedRun
from trainbus.observe.report.sentences import Best, verdict
from trainbus.observe.run_folder import RunFolder

FEW: Final = 8
"""A page of more runs has a table and curves, and no costs, tables and settings of each run."""

_MOST_SETTINGS, _MOST_METRICS = 12, 6  # columns of the table
_FEWEST_PARALLEL: Final = 6  # runs
_AXES: Final = (7, 3)  # of settings and of metrics
_MOST_TEXTS: Final = 8  # places on an axis of texts
_TOP, _BOTTOM, _NONE = 40.0, 250.0, 280.0  # of a drawing 1000 wide and 300 high; runs without the value are at the last one
_LEFT, _RIGHT = 60.0, 940.0
_LOG: Final = 30.0  # ratio of the greatest to the least value from which on an axis is logarithmic
_TOLD: Final = 4  # settings of the best run and of the worst one

Rules = Callable[[Iterable[str]], Mapping[str, str]]
"""Takes names of metrics. Returns ``"greater"`` or ``"less"``, whichever is better, for those whose names imply it."""


class Column(NamedTuple):
    """A fact of all runs. Its text is empty for a run without it; ``numbers`` has NaN where the value is not a number."""

    name: str
    head: str
    texts: list[str]
    numbers: list[float]

    @property
    def numeric(self) -> bool:
        """True if each value is a number or absent."""
        return all(
            number == number or not text or text == "none" for text, number in zip(self.texts, self.numbers, strict=True)
        )


class Axis(NamedTuple):
    """An axis of parallel coordinates at ``x``, its marks as height and text, and the height of each run."""

    column: Column
    x: float
    marks: list[tuple[float, str]]
    heights: list[float]


class Overview(NamedTuple):
    """What differs between runs and what came out. ``colours`` are the classes of the runs' lines.

    ``best`` is the metric that ranks the runs, as an index into ``metrics``; None if no name implies what is better.
    """

    settings: list[Column]
    metrics: list[Column]
    left_out: int
    best: int | None
    order: list[int]
    colours: list[str]
    axes: list[Axis]

    def lines(self) -> list[str]:
        """Return the line of each run through the axes, as the path of an SVG."""
        return [
            "M" + "L".join(f"{axis.x:.0f} {axis.heights[run]:.0f}" for axis in self.axes) for run in range(len(self.colours))
        ]


def overview(runs: Sequence[ReportedRun], rules: Rules) -> Overview:
    """Return the columns of runs, the order of the runs by their best metric, and their colours.

    Up to eight runs have a colour each. Of more runs the colour tells the fifth to which the best metric belongs.
    """
    settings = [settings_of(run.story) for run in runs]
    known = _known(runs, rules)
    results = [metrics_of(RunFolder(run.path), run.story, known) for run in runs]
    differ = [*filter(is_shown, differing(settings))]
    heads = short_names(dict.fromkeys(name for row in settings for name in row))
    columns = [_column(name, heads[name], settings) for name in differ]
    taken = {name for row in settings for name in row}  # a rate that is logged, too, did not come out
    came = [name for name in dict.fromkeys(name for row in results for name in row) if stage_and_name(name)[1] not in taken]
    metrics = [_column(name, name, results) for name in came]
    named = [index for index, column in enumerate(metrics) if column.name in known]
    best = next((index for index in named if known[metrics[index].name] == "greater"), next(iter(named), None))
    if best is not None:
        metrics.insert(0, metrics.pop(best))
        best = 0
    order = [] if best is None else _ranked(metrics[0], greater=known[metrics[0].name] == "greater")
    shown, came_out = columns[:_MOST_SETTINGS], metrics[:_MOST_METRICS]
    left_out = len(columns) - len(shown) + len(metrics) - len(came_out)
    return Overview(shown, came_out, left_out, best, order, _colours(len(runs), order), _axes(columns, came_out, len(runs)))


def summary(runs: Sequence[ReportedRun], names: Sequence[str], seen: Overview) -> list[str]:
    """Return sentences about all runs: how they ended, and which have the best and the worst value of the first metric."""
    states = Counter(str(run.story.state) for run in runs)
    told = [f"{len(runs)} runs: {', '.join(f'{number} {state}' for state, number in states.most_common())}."]
    if seen.best is not None and seen.order:
        metric = seen.metrics[seen.best]
        for what, index in (("Best", seen.order[0]), ("Worst", seen.order[-1])):
            own = ", ".join(f"{one.head} {one.texts[index]}" for one in seen.settings[:_TOLD] if one.texts[index])
            told.append(f"{what} {metric.head}: {metric.texts[index]}, {names[index]}{f' ({own})' if own else ''}.")
        if without := len(runs) - len(seen.order):
            told.append(f"Without {metric.head}: {without} of {len(runs)} runs.")
    return told


def summaries(runs: Sequence[ReportedRun], best: Best, rules: Rules) -> list[dict[str, Any]]:
    """Return what a page tells about each run as data: its state, its verdict, its settings and its metrics."""
    known, found = _known(runs, rules), []
    for run in runs:
        row = {"path": str(run.path), "state": str(run.story.state), "epochs": run.epochs, "iterations": run.iterations}
        row |= {"seconds": run.seconds, "verdict": verdict(run, best), "settings": settings_of(run.story)}
        found.append(row | {"metrics": metrics_of(RunFolder(run.path), run.story, known)})
    return found


def _known(runs: Sequence[ReportedRun], rules: Rules) -> Mapping[str, str]:
    return rules(dict.fromkeys(name for run in runs for line in run.story.of(Evaluation) for name in line.metrics))


def _column(name: str, head: str, rows: Sequence[Row]) -> Column:
    texts = [shortened(_text(row[name])) if name in row else "" for row in rows]
    return Column(name, head, texts, [_number(row.get(name)) for row in rows])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else text_of(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _ranked(column: Column, *, greater: bool) -> list[int]:
    """Return the indices of the runs that have a number, the best first."""
    there = [index for index, number in enumerate(column.numbers) if math.isfinite(number)]
    return sorted(there, key=lambda index: column.numbers[index], reverse=greater)


def _colours(number: int, order: Sequence[int]) -> list[str]:
    if number <= FEW:
        return [f"c{index + 1}" for index in range(number)]
    places = {run: place for place, run in enumerate(order)}
    return [f"r{5 * places[run] // len(order) + 1}" if run in places else "c8" for run in range(number)]


def _axes(settings: Sequence[Column], metrics: Sequence[Column], runs: int) -> list[Axis]:
    fit = [column for column in settings if column.numeric or len(set(column.texts)) <= _MOST_TEXTS]
    shown = [*fit[: _AXES[0]], *reversed([one for one in metrics if one.numeric][: _AXES[1]])]
    if runs < _FEWEST_PARALLEL or len(shown) < 2:
        return []
    step = (_RIGHT - _LEFT) / (len(shown) - 1)
    return [_axis(column, _LEFT + index * step) for index, column in enumerate(shown)]


def _axis(column: Column, x: float) -> Axis:
    finite = [number for number in column.numbers if math.isfinite(number)]
    if column.numeric and finite:
        least, greatest = min(finite), max(finite)
        log = least > 0 and greatest / least >= _LOG
        scale: Callable[[float], float] = math.log if log else float
        whole = scale(greatest) - scale(least)

        def height(number: float) -> float:
            return _BOTTOM - (_BOTTOM - _TOP) * ((scale(number) - scale(least)) / whole if whole else 0.5)

        heights = [height(number) if math.isfinite(number) else _NONE for number in column.numbers]
        marks = [(height(number), f"{number:.4g}") for number in dict.fromkeys((least, greatest))]
        missing = len(finite) < len(column.numbers)
    else:
        texts = sorted({text for text in column.texts if text})
        step = (_BOTTOM - _TOP) / max(len(texts) - 1, 1)
        at = {text: _BOTTOM - index * step for index, text in enumerate(texts)}
        heights, marks = [at.get(text, _NONE) for text in column.texts], [(place, text) for text, place in at.items()]
        missing = "" in column.texts
    return Axis(column, x, [*marks, *([(_NONE, "none")] if missing else [])], heights)
