"""Build the charts of a report, and their descriptions in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from trainbus.observe.curves import Array, Curve, stage_and_name
from trainbus.observe.report.reported_run import ReportedRun, StepTimes
from trainbus.observe.verdict import duration


class Series(NamedTuple):
    """One line of a chart. ``run`` is the index of its run; ``dashed`` is true beside a line of another stage of the run."""

    name: str
    run: int
    curve: Curve
    dashed: bool = False


class Chart(NamedTuple):
    """A chart. ``unit`` is the unit of its values: empty, or ``"s"``."""

    title: str
    series: list[Series]
    unit: str = ""

    def words(self, one: Series) -> str:
        """Describe a line of the chart: its last, least and greatest value, and the iterations of these."""
        finite = np.isfinite(one.curve.values)
        if not finite.any():
            return "no finite value"
        values, iterations = one.curve.values[finite], one.curve.iterations[finite]
        last = f"last {self.shown(values[-1])}"
        if len(values) == 1 or values.min() == values.max():
            return f"{last} at all {len(values):,} points" if len(values) > 1 else f"{last}, the only point"
        ends = ((what, int(index)) for what, index in (("least", values.argmin()), ("greatest", values.argmax())))
        return ", ".join([last, *(f"{what} {self.shown(values[i])} at iteration {iterations[i]:,.0f}" for what, i in ends)])

    def together(self) -> str:
        """Describe many lines: their number, and the runs with the least and the greatest last value."""
        lasts = [(float(one.curve.values[-1]), one.name) for one in self.series if np.isfinite(one.curve.values[-1])]
        if not lasts:
            return f"{len(self.series)} lines, no finite last value"
        (least, lowest), (greatest, highest) = min(lasts), max(lasts)
        ends = f"{self.shown(least)} ({lowest}) to {self.shown(greatest)} ({highest})"
        return f"{len(self.series)} lines, last values from {ends}"

    def shown(self, value: float) -> str:
        """Return a value with its unit."""
        return duration(value) if self.unit == "s" else f"{value:.4g}"


def scalar_charts(runs: Sequence[ReportedRun], names: Sequence[str]) -> list[Chart]:
    """Return a chart for each metric, with a line for each run and each stage that has it: validations and losses first."""
    scalars = dict.fromkeys(name for run in runs for name in run.curves)
    together: dict[str, list[str]] = {}
    for scalar in scalars:
        together.setdefault(stage_and_name(scalar)[1], []).append(scalar)
    ordered = sorted(together.items(), key=lambda one: not ("loss" in one[0].lower() or any(map(_of_validation, one[1]))))
    return [_metric_chart(own[0] if len(own) == 1 else metric, own, runs, names) for metric, own in ordered]


def _metric_chart(title: str, scalars: Sequence[str], runs: Sequence[ReportedRun], names: Sequence[str]) -> Chart:
    several = len(scalars) > 1
    return Chart(
        title,
        [
            Series(
                (f"{names[index]}, {scalar}" if several else names[index]) if len(runs) > 1 or not several else scalar,
                index,
                run.curves[scalar],
                several and _of_validation(scalar),
            )
            for index, run in enumerate(runs)
            for scalar in scalars
            if scalar in run.curves
        ],
    )


def _of_validation(scalar: str) -> bool:
    return stage_and_name(scalar)[0] == "val"


def step_charts(runs: Sequence[ReportedRun], names: Sequence[str]) -> list[Chart]:
    """Return charts of step-time percentiles over time: one chart for one run, two for several runs."""
    several, times = len(runs) > 1, [run.step_times() for run in runs]
    shares = (("median", 0.5), ("99th percentile", 0.99)) if several else (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99))
    lines = {
        what: [
            Series(names[index] if several else what, index, _over_time(own, share))
            for index, own in enumerate(times)
            if len(own) > 1
        ]
        for what, share in shares
    }
    if several:
        return [Chart(f"Time of an iteration, {what}", series, "s") for what, series in lines.items() if series]
    together = [*chain.from_iterable(lines.values())]
    return [Chart("Time of an iteration", together, "s")] if together else []


def drawn(charts: Iterable[Chart], runs: Sequence[ReportedRun], most: int) -> dict[str, Any]:
    """Return charts as JSON for the page. Lines with equal positions share them."""
    places: dict[bytes, int] = {}
    axes: list[Mapping[str, Any]] = []
    made: list[dict[str, Any]] = []
    for chart in charts:
        lines = []
        for one in chart.series:
            curve, run = one.curve.thinned(most), runs[one.run]
            axis = [curve.iterations, run.elapsed(curve.times), run.epochs_at(curve)]
            key = b"".join(column.tobytes() for column in axis) + bytes([one.run % 256])
            if key not in places:
                places[key] = len(axes)
                axes.append({"iter": _numbers(axis[0], 12), "time": _numbers(axis[1], 7), "epoch": _numbers(axis[2], 6)})
            line = {"name": one.name, "run": one.run, "axis": places[key], "values": _numbers(curve.values, 6)}
            lines.append(line | ({"dashed": True} if one.dashed else {}))
        made.append({"title": chart.title, "unit": chart.unit, "series": lines})
    return {"charts": made, "axes": axes}


def _over_time(times: Iterable[StepTimes], share: float) -> Curve:
    rows = [(one.iter, one.epoch, one.time, one.steps.quantile(share)) for one in times]
    return Curve(*np.array(rows, np.float64).reshape(-1, 4).T)


def _numbers(column: Array, digits: int) -> list[float | int | None]:
    """Return numbers rounded to some digits, integers without a point, and None for non-finite values."""
    return [
        None
        if not np.isfinite(value)
        else int(value)
        if value == int(value) and abs(value) < 1e15
        else float(f"{value:.{digits}g}")
        for value in column.tolist()
    ]
