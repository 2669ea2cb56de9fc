"""Figures of handing events over: the cost for the publisher, and the time until they arrive."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.table import Table

from benchmarks.harness import SUBJECT

MICROSECONDS, MILLISECONDS = 1e6, 1e3


@dataclass(frozen=True)
class Round:
    """The measurements of one contender in one round; in seconds."""

    publisher: Sequence[float]
    """Duration of each publish, without the time of reading the clock."""
    delivery: Sequence[float]
    """Time from each publish to its arrival; empty for contenders that deliver outside of this process."""


@dataclass(frozen=True)
class Promise:
    """A budget in seconds: the publisher's p50, and the delivery's p99."""

    row: int
    publisher: float
    delivery: float
    of: tuple[str, ...]


@dataclass(frozen=True)
class Figures:
    """One contender under one condition; seconds. Percentiles are medians over the rounds, the maximum is of all."""

    name: str
    p50: float
    p99: float
    worst: float
    delivery_p50: float | None
    delivery_p99: float | None
    rate: float | None
    """Events per second."""
    met: bool | None
    """Whether it keeps the budget; None without a budget."""


@dataclass(frozen=True)
class HandOffFigures:
    """The measurements under one condition."""

    title: str
    floor: str
    rounds: Mapping[str, list[Round]]
    promise: Promise | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Events per second, one entry a round, where that was measured."""

    chart: ClassVar[str] = "handoff_chart"

    def rows(self) -> list[Figures]:
        """The figures of all contenders, the cheapest for the publisher first."""
        return sorted((self._row(name) for name in self.rounds), key=lambda row: row.p50)

    def _row(self, name: str) -> Figures:
        rounds = self.rounds[name]
        p50, p99 = (_typical([each.publisher for each in rounds], percent) for percent in (50, 99))
        delivery = [each.delivery for each in rounds if each.delivery]
        worst = max(max(each.publisher) for each in rounds)
        arrival_p50, arrival_p99 = (_typical(delivery, percent) if delivery else None for percent in (50, 99))
        met = None
        if self.promise is not None and name in self.promise.of:
            met = p50 <= self.promise.publisher and arrival_p99 is not None and arrival_p99 <= self.promise.delivery
        rate = statistics.median(self.rates[name]) if name in self.rates else None
        return Figures(name, p50, p99, worst, arrival_p50, arrival_p99, rate, met)

    def table(self) -> Table:
        grid = Table(title=self.title, title_justify="left", title_style="bold", caption_justify="left")
        grid.add_column("")
        last = ["events/s"] if self.rates else ["budget"] if self.promise else []
        for heading in ("p50 µs", "p99 µs", "max µs", "delivered p50 ms", "p99 ms", *last):
            grid.add_column(heading, justify="right")
        for row in self.rows():
            name = f"{row.name} (floor)" if row.name == self.floor else row.name
            costs = [amount(value, MICROSECONDS) for value in (row.p50, row.p99, row.worst)]
            arrivals = [amount(value, MILLISECONDS) for value in (row.delivery_p50, row.delivery_p99)]
            end = [amount(row.rate, 1) if self.rates else verdict(row.met)] if last else []
            grid.add_row(name, *costs, *arrivals, *end, style="bold" if row.name.startswith(SUBJECT) else "")
        if self.promise is not None:
            at_most = f"p50 ≤ {amount(self.promise.publisher, MICROSECONDS)} µs"
            grid.caption = f"Budget, row {self.promise.row}: {at_most}, delivered p99 ≤ {self.promise.delivery * 1e3:.0f} ms"
        return grid

    def as_dict(self) -> dict[str, object]:
        """Everything in seconds, unrounded."""
        promise = self.promise
        return {
            "title": self.title,
            "floor": self.floor,
            "rounds": len(next(iter(self.rounds.values()))),
            "events_per_round": len(next(iter(self.rounds.values()))[0].publisher),
            "budget": promise and {"row": promise.row, "p50": promise.publisher, "delivery_p99": promise.delivery},
            "contenders": [
                {
                    "name": row.name,
                    "p50_seconds": row.p50,
                    "p99_seconds": row.p99,
                    "max_seconds": row.worst,
                    "delivery_p50_seconds": row.delivery_p50,
                    "delivery_p99_seconds": row.delivery_p99,
                    "events_per_second": row.rate,
                    "budget_met": row.met,
                }
                for row in self.rows()
            ],
            "left_out": dict(self.left_out),
        }


def amount(seconds: float | None, scale: float) -> str:
    if seconds is None:
        return ""
    value = seconds * scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def verdict(met: bool | None) -> str:
    return "" if met is None else "[green]pass[/]" if met else "[red]FAIL[/]"


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _typical(rounds: Sequence[Sequence[float]], percent: int) -> float:
    return statistics.median(percentile(values, percent) for values in rounds)
