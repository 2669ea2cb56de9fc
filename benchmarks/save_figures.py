"""Figures of checkpoints in a training: the steps around them, and the time until they are durable."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table

from benchmarks.amounts import amount
from benchmarks.handoff import percentile
from benchmarks.harness import SUBJECT, TIMES
from benchmarks.save_job import Run

LIMIT = 1.3
"""Times one copy of the same tensors: the budget of a stall."""
ROW = 6
"""Of the design's budgets."""


@dataclass(frozen=True)
class Save:
    """One checkpoint; seconds."""

    stall: float
    """The worst step from the one that saves to the next save, over the median step."""
    others: Sequence[float]
    """The steps in between, without the one that saves."""
    durable: float
    copy: float
    """The floor, measured before the next one."""


def saves(run: Run) -> list[Save]:
    """The checkpoints of a process."""
    usual, found = statistics.median(run.steps), []
    for number, (durable, copy) in enumerate(zip(run.durable, run.copies, strict=True), 1):
        saving = number * run.interval - 1
        window = run.steps[saving : saving + run.interval]
        found.append(Save(max(window) - usual, window[1:], durable, copy))
    return found


@dataclass(frozen=True)
class Row:
    """One way to save; seconds. Medians over the saves of all rounds but the first of each process."""

    name: str
    stall: float
    worst: float
    """The longest stall of all."""
    ratio: float
    """The stall over the copy in the same process."""
    quartiles: tuple[float, float]
    """Of the ratio."""
    copy: float
    step: float
    """The median step."""
    p99: float
    """Of the steps that save nothing."""
    durable: float
    first: float
    """The stall of the first save, which pays for memory that was not used before."""
    first_ratio: float

    @property
    def met(self) -> bool | None:
        """Whether it keeps the budget; None for other systems."""
        return self.ratio <= LIMIT if self.name.startswith(SUBJECT) else None


@dataclass(frozen=True)
class SaverFigures:
    """The checkpoints of all ways, of one size."""

    title: str
    runs: Mapping[str, Sequence[Run]]
    left_out: Mapping[str, str]

    chart: ClassVar[str] = "savers_chart"
    bars: ClassVar[str] = "the worst step around a save less the median step"
    floor: ClassVar[str] = "one copy"

    def rows(self) -> list[Row]:
        """The figures of each way, the shortest stall first."""
        return sorted((row(name, runs) for name, runs in self.runs.items()), key=lambda row: row.stall)

    def table(self) -> Table:
        grid = Table(title=self.title, title_justify="left", title_style="bold", caption_justify="left")
        grid.add_column("", no_wrap=True)
        for heading in ("stall\nms", f"{TIMES}\ncopy", f"first\n{TIMES} copy", "others\np99 ms", "durable\nms"):
            grid.add_column(heading, justify="right")
        for row in self.rows():
            verdict = "" if row.met is None else "[green]pass[/] " if row.met else "[red]FAIL[/] "
            stall = [amount(row.stall, "ms"), f"{verdict}{row.ratio:.2f}", f"{row.first_ratio:.1f}"]
            rest = [amount(row.p99, "ms"), amount(row.durable, "ms")]
            grid.add_row(row.name, *stall, *rest, style="bold" if row.name.startswith(SUBJECT) else "")
        copy, step = (amount(statistics.median(times), "ms") for times in self._floors())
        grid.caption = f"one copy {copy} ms, a step {step} ms; budget: row {ROW}, stall ≤ {LIMIT} {TIMES} the copy"
        return grid

    def _floors(self) -> tuple[list[float], list[float]]:
        """The copies and the steps."""
        return [row.copy for row in self.rows()], [row.step for row in self.rows()]

    def as_dict(self) -> dict[str, object]:
        """Everything in seconds, unrounded."""
        return {
            "title": self.title,
            "floor": self.floor,
            "rounds": len(next(iter(self.runs.values()))),
            "budget": {"row": ROW, "limit": LIMIT},
            "contenders": [
                {
                    "name": row.name,
                    "stall_seconds": row.stall,
                    "worst_stall_seconds": row.worst,
                    "copy_seconds": row.copy,
                    "ratio_to_copy": row.ratio,
                    "ratio_quartiles": row.quartiles,
                    "first_stall_seconds": row.first,
                    "first_ratio_to_copy": row.first_ratio,
                    "step_seconds": row.step,
                    "other_steps_p99_seconds": row.p99,
                    "durable_seconds": row.durable,
                    "budget_met": row.met,
                }
                for row in self.rows()
            ],
            "left_out": dict(self.left_out),
        }


def row(name: str, runs: Sequence[Run]) -> Row:
    by_run = [saves(run) for run in runs]
    first, later = [found[0] for found in by_run], [save for found in by_run for save in found[1:]]
    ratios = [save.stall / save.copy for save in later]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        name,
        stall=statistics.median(save.stall for save in later),
        worst=max(save.stall for save in later),
        ratio=statistics.median(ratios),
        quartiles=(low, high),
        copy=statistics.median(save.copy for save in later),
        step=statistics.median(step for run in runs for step in run.steps),
        p99=percentile([step for save in later for step in save.others], 99),
        durable=statistics.median(save.durable for save in later),
        first=statistics.median(save.stall for save in first),
        first_ratio=statistics.median(save.stall / save.copy for save in first),
    )
