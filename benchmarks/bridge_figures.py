"""Figures of a bus in another library's trainer: seconds added to an iteration."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table

from benchmarks.amounts import amount
from benchmarks.harness import SUBJECT, Samples

ALONE, EMPTY = "alone", "an empty callback"
NO_OP, EVERYTHING = f"{SUBJECT}, a no-op for every event", f"{SUBJECT}, everything on"
LIMIT = 15e-6
"""Seconds that a bus without subscribers may add."""
ROW = 10
"""Of the design's budgets."""


@dataclass(frozen=True)
class Added:
    """The time that one way adds to an iteration of its trainer alone; in seconds."""

    trainer: str
    name: str
    median: float
    """Of the differences within a round."""
    minimum: float
    """The difference of the minima."""
    quartiles: tuple[float, float]
    alone: float
    """An iteration of the trainer alone, the median."""

    @property
    def met(self) -> bool | None:
        """Whether it keeps the budget; None without a budget."""
        return self.median <= LIMIT if self.name == SUBJECT else None


@dataclass(frozen=True)
class BridgeFigures:
    """The measurements by trainer: seconds per iteration, one entry a round."""

    samples: Mapping[str, Samples]
    left_out: Mapping[str, str]

    title: ClassVar[str] = "Added to an iteration by a bus in a trainer"
    chart: ClassVar[str] = "bridges_chart"

    def rows(self) -> Iterator[Added]:
        """The added time of each way, trainer after trainer."""
        for trainer, samples in self.samples.items():
            for name, times in samples.items():
                if name != ALONE:
                    yield added(trainer, name, times, samples[ALONE])

    def table(self) -> Table:
        grid = Table(title=self.title, title_justify="left", title_style="bold", caption_justify="left")
        grid.add_column("", no_wrap=True)
        for heading in ("median µs", "minimum µs", "budget"):
            grid.add_column(heading, justify="right")
        for trainer in self.samples:
            rows = [row for row in self.rows() if row.trainer == trainer]
            grid.add_row(f"{trainer} {ALONE}", amount(rows[0].alone, "µs"), amount(min(self.samples[trainer][ALONE]), "µs"))
            for row in rows:
                verdict = "" if row.met is None else "[green]pass[/]" if row.met else "[red]FAIL[/]"
                style = "bold" if row.name == SUBJECT else ""
                grid.add_row(f"  {row.name}", signed(row.median), signed(row.minimum), verdict, style=style)
            grid.add_section()
        grid.caption = f"budget: row {ROW}, a bus without subscribers adds ≤ {amount(LIMIT, 'µs')} µs"
        return grid

    def as_dict(self) -> dict[str, object]:
        """Everything in seconds, unrounded."""
        return {
            "title": self.title,
            "taken_off": ALONE,
            "rounds": len(next(iter(self.samples.values()))[ALONE]),
            "budget": {"row": ROW, "seconds": LIMIT},
            "contenders": [
                {
                    "trainer": row.trainer,
                    "name": row.name,
                    "median_seconds": row.median,
                    "minimum_seconds": row.minimum,
                    "quartiles_seconds": row.quartiles,
                    "alone_seconds": row.alone,
                    "budget_met": row.met,
                }
                for row in self.rows()
            ],
            "left_out": dict(self.left_out),
        }


def signed(seconds: float) -> str:
    """Format seconds as microseconds with a sign."""
    return f"{'+' if seconds >= 0 else ''}{amount(seconds, 'µs')}"


def added(trainer: str, name: str, times: list[float], alone: list[float]) -> Added:
    differences = [time - bare for time, bare in zip(times, alone, strict=True)]
    low, _, high = statistics.quantiles(differences, n=4) if len(differences) > 1 else differences * 3
    minimum = min(times) - min(alone)
    return Added(trainer, name, statistics.median(differences), minimum, (low, high), statistics.median(alone))
