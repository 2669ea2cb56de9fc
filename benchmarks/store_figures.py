"""Figures of saves to a store or a disk: how long the training stands still, what it loses, when the save is durable."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table

from benchmarks.amounts import amount
from benchmarks.harness import SUBJECT, TIMES
from benchmarks.save_figures import LIMIT
from benchmarks.store_job import Run

ROW, DURABLE_LIMIT = 11, 0.7
"""The budget: until durable, times plain PyTorch; the one of standing still, times one copy, is that of ``savers``."""


@dataclass(frozen=True)
class Row:
    """One way to save; seconds. Medians over the saves of all rounds; ratios are taken within a round."""

    name: str
    stall: float
    ratio: float
    """The stall over the copy in the same process."""
    copy: float
    lost: float
    """By the training: the stall, and the slower steps until the save is durable."""
    durable: float
    """While the training waits."""
    beside: float
    """The same while it continues."""
    over_floor: float
    over_reference: float


@dataclass(frozen=True)
class StoreFigures:
    """The saves of all ways, of one size, in one place."""

    title: str
    runs: Mapping[str, Sequence[Run]]
    floor: str
    """The way that only moves as many bytes."""
    reference: str
    """The way of plain PyTorch."""
    budget: bool
    """Whether the design promises the time until a save is durable."""
    left_out: Mapping[str, str]

    chart: ClassVar[str] = "savers_chart"
    bars: ClassVar[str] = "the time of the saving function"

    def rows(self) -> list[Row]:
        """The figures of each way, the first one that is durable first."""
        return sorted(map(self._row, self.runs), key=lambda row: row.durable)

    def met(self) -> tuple[bool, bool]:
        """Return whether our stall, and our time until durable, keep their budgets."""
        ours = self._row(SUBJECT)
        return ours.ratio <= LIMIT, ours.over_reference <= DURABLE_LIMIT

    def table(self) -> Table:
        grid = Table(title=self.title, title_justify="left", title_style="bold", caption_justify="left", pad_edge=False)
        grid.add_column("", no_wrap=True)
        for heading in ("durable\nms", f"{TIMES}\nplain", "beside\nms", "stall\nms", f"{TIMES}\ncopy", "lost\nms"):
            grid.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows():
            durable = [amount(row.durable, "ms"), times(row.over_reference), amount(row.beside, "ms")]
            stall = [amount(row.stall, "ms"), times(row.ratio), amount(row.lost, "ms")]
            name = f"{row.name} (floor)" if row.name == self.floor else row.name
            grid.add_row(name, *durable, *stall, style="bold" if row.name.startswith(SUBJECT) else "")
        words = ["[green]pass[/]" if met else "[red]FAIL[/]" for met in self.met()]
        goals = [f"stall ≤ {LIMIT} {TIMES} one copy {words[0]}"]
        if self.budget:
            goals.insert(0, f"durable ≤ {DURABLE_LIMIT} {TIMES} plain {words[1]}")
        grid.caption = f"plain: {self.reference}; row {ROW}: {', '.join(goals)}"
        return grid

    def as_dict(self) -> dict[str, object]:
        """Everything in seconds, unrounded."""
        stall, durable = self.met()
        return {
            "title": self.title,
            "floor": self.floor,
            "reference": self.reference,
            "rounds": len(self.runs[SUBJECT]),
            "budget": {
                "row": ROW,
                "stall": {"limit": LIMIT, "met": stall},
                "durable": {"limit": DURABLE_LIMIT, "met": durable} if self.budget else None,
            },
            "contenders": [
                {
                    "name": row.name,
                    "durable_seconds": row.durable,
                    "durable_over_floor": row.over_floor,
                    "durable_over_reference": row.over_reference,
                    "durable_beside_training_seconds": row.beside,
                    "stall_seconds": row.stall,
                    "copy_seconds": row.copy,
                    "stall_over_copy": row.ratio,
                    "lost_seconds": row.lost,
                }
                for row in self.rows()
            ],
            "left_out": dict(self.left_out),
        }

    def _row(self, name: str) -> Row:
        runs = self.runs[name]
        stalls, copies, lost, durable, beside = (
            [each for run in runs for each in getattr(run, what)] for what in ("stalls", "copies", "lost", "durable", "beside")
        )
        ratios = [stall / copy for stall, copy in zip(stalls, copies, strict=True)]
        return Row(
            name,
            stall=statistics.median(stalls),
            ratio=statistics.median(ratios),
            copy=statistics.median(copies),
            lost=statistics.median(lost or stalls),
            durable=statistics.median(durable),
            beside=statistics.median(beside or durable),
            over_floor=self._over(name, self.floor),
            over_reference=self._over(name, self.reference),
        )

    def _over(self, name: str, other: str) -> float:
        """Return the median over the rounds of the time until durable, over that of another way."""
        rounds = zip(self.runs[name], self.runs[other], strict=True)
        return statistics.median(statistics.median(one.durable) / statistics.median(two.durable) for one, two in rounds)


def times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}"
