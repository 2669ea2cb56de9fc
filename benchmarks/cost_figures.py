"""Figures of profilers: seconds that they add to an iteration, and the content of their reports."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table

from benchmarks.amounts import amount
from benchmarks.bridge_figures import ALONE, signed
from benchmarks.harness import SUBJECT, Samples
from benchmarks.peers import Told

LIMIT = 0.02
"""Share of a step of 1 ms that the recorder may take."""
LIMITED = "A step of 1 ms"


@dataclass(frozen=True)
class Overhead:
    """The time that a profiler adds to an iteration of its own system's loop."""

    system: str
    name: str
    median: float
    """Seconds; the median of the differences within a round."""
    share: float
    """Of the iteration without it; the median over the rounds."""
    quartiles: tuple[float, float]
    """Of the share."""
    alone: float
    """Seconds of an iteration without it, the median."""
    told: Told


@dataclass(frozen=True)
class CostFigures:
    """The measurements by system: seconds per iteration, one entry a round."""

    title: str
    samples: Mapping[str, Samples]
    told: Mapping[str, Told]
    left_out: Mapping[str, str]

    chart: ClassVar[str] = "costs_chart"

    def rows(self) -> Iterator[Overhead]:
        """The added time of each profiler, system after system."""
        for system, samples in self.samples.items():
            for name, times in samples.items():
                if name != ALONE:
                    yield overhead(system, name, times, samples[ALONE], self.told[name])

    def met(self, row: Overhead) -> bool | None:
        """Whether it keeps the budget; None without a budget."""
        return row.share <= LIMIT if row.name == SUBJECT and self.title.startswith(LIMITED) else None

    def table(self) -> Table:
        grid = Table(title=self.title, title_justify="left", title_style="bold", caption_justify="left")
        grid.add_column("", no_wrap=True)
        for heading in ("median µs", "of a step", "budget"):
            grid.add_column(heading, justify="right")
        grid.add_column("logging")
        grid.add_column("checkpoints")
        for system in self.samples:
            rows = [row for row in self.rows() if row.system == system]
            grid.add_row(f"{system} {ALONE}", amount(rows[0].alone, "µs"))
            for row in rows:
                met = self.met(row)
                verdict = "" if met is None else "[green]pass[/]" if met else "[red]FAIL[/]"
                style = "bold" if row.name == SUBJECT else ""
                figures = signed(row.median), f"{row.share:+.1%}", verdict
                grid.add_row(f"  {row.name}", *figures, row.told.logging, row.told.checkpoints, style=style)
            grid.add_section()
        if self.title.startswith(LIMITED):
            grid.caption = f"budget: the recorder adds ≤ {LIMIT:.0%}"
        return grid

    def as_dict(self) -> dict[str, object]:
        """Everything in seconds, unrounded."""
        return {
            "title": self.title,
            "taken_off": ALONE,
            "rounds": {system: len(samples[ALONE]) for system, samples in self.samples.items()},
            "budget": {"share": LIMIT} if self.title.startswith(LIMITED) else None,
            "contenders": [
                {
                    "system": row.system,
                    "name": row.name,
                    "median_seconds": row.median,
                    "share": row.share,
                    "share_quartiles": row.quartiles,
                    "alone_seconds": row.alone,
                    "logging": row.told.logging,
                    "checkpoints": row.told.checkpoints,
                    "budget_met": self.met(row),
                }
                for row in self.rows()
            ],
            "left_out": dict(self.left_out),
        }


def overhead(system: str, name: str, times: list[float], alone: list[float], told: Told) -> Overhead:
    differences = [time - bare for time, bare in zip(times, alone, strict=True)]
    shares = [difference / bare for difference, bare in zip(differences, alone, strict=True)]
    low, _, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    return Overhead(
        system,
        name,
        statistics.median(differences),
        statistics.median(shares),
        (low, high),
        statistics.median(alone),
        told,
    )
