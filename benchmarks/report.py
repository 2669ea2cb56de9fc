"""Print the table, and write the JSON file and the chart."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.amounts import amount, goal
from benchmarks.bridge_figures import BridgeFigures
from benchmarks.cost_figures import CostFigures
from benchmarks.handoff import HandOffFigures
from benchmarks.harness import SUBJECT, TIMES, Comparison, Row
from benchmarks.save_figures import SaverFigures
from benchmarks.store_figures import StoreFigures

Result = Comparison | HandOffFigures | SaverFigures | StoreFigures | BridgeFigures | CostFigures


console = Console()


def heading(environment: Mapping[str, object]) -> None:
    console.print("{cpu}, {cores} cores, {system}, {python}".format_map(environment))
    libraries = environment["libraries"]
    console.print(" · ".join(f"{name} {version}" for name, version in libraries.items()), style="dim")


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a status line, redrawn between rounds only, so that no refresh thread runs beside the measurement."""

    def tick(done: int, rounds: int) -> None:
        if console.is_terminal:
            console.print(f"{name}: round {done} of {rounds}", end="\r", style="dim")

    yield tick
    if console.is_terminal:
        console.print(" " * 60, end="\r")


def tables(comparisons: Sequence[Result]) -> None:
    for comparison in comparisons:
        console.print(table(comparison) if isinstance(comparison, Comparison) else comparison.table())
    left_out = {peer: reason for comparison in comparisons for peer, reason in comparison.left_out.items()}
    for peer, reason in left_out.items():
        console.print(f"{peer} is left out: {reason}", style="yellow")


def table(comparison: Comparison) -> Table:
    grid = Table(title=comparison.title, title_justify="left", title_style="bold", caption_justify="left")
    grid.add_column("")
    for heading_text in (f"median {comparison.unit}", f"minimum {comparison.unit}", f"{TIMES} floor", "budget"):
        grid.add_column(heading_text, justify="right")
    if comparison.remarks:
        grid.add_column("")
    for row in sorted(comparison.rows(), key=lambda row: row.ratio):
        subject = row.name == SUBJECT
        name = f"{row.name} (floor)" if row.name == comparison.floor else row.name
        cells = (name, amount(row.median, comparison.unit), amount(row.minimum, comparison.unit), f"{row.ratio:.2f}")
        remark = [comparison.remarks.get(row.name, "")] if comparison.remarks else []
        grid.add_row(*cells, verdict(comparison) if subject else "", *remark, style="bold" if subject else "")
    if comparison.baseline is not None:
        bare = min(comparison.samples[comparison.baseline])
        grid.caption = f"{comparison.baseline}: {amount(bare, comparison.unit)} {comparison.unit} at best, taken off"
    return grid


def verdict(comparison: Comparison) -> str:
    met = comparison.verdict()
    if met is None:
        return ""
    word = "[green]pass[/]" if met else "[red]FAIL[/]"
    row = "" if comparison.budget.row is None else f"row {comparison.budget.row}, "
    return f"{word}: {row}≤ {goal(comparison)}"


def save(name: str, comparisons: Sequence[Result], environment: Mapping[str, object], quick: bool, out: Path) -> list[Path]:
    """Write ``name.json`` and, where matplotlib is installed, ``name.png``; returns what was written."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "quick": quick, **environment, "comparisons": [as_dict(c) for c in comparisons]}
    data = out / f"{name}.json"
    data.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    special = [comparison.chart for comparison in comparisons if comparison.chart != Comparison.chart]
    try:
        chart = importlib.import_module(f"benchmarks.{(special or [Comparison.chart])[0]}")
    except ImportError as error:
        console.print(f"no chart: {error}", style="yellow")
        return [data]
    picture = out / f"{name}.png"
    chart.draw(comparisons, environment, picture)
    return [data, picture]


def as_dict(comparison: Result) -> dict[str, object]:
    """Everything in seconds per operation, unrounded."""
    if not isinstance(comparison, Comparison):
        return comparison.as_dict()
    budget = comparison.budget
    return {
        "title": comparison.title,
        "floor": comparison.floor,
        "taken_off": comparison.baseline,
        "rounds": len(next(iter(comparison.samples.values()))),
        "budget": None
        if budget is None
        else {"row": budget.row, "limit": budget.limit, "seconds": budget.seconds, "met": comparison.verdict()},
        "contenders": [row_as_dict(row) for row in comparison.rows()],
        "seconds": {name: {"median": median, "minimum": low} for name, (median, low) in comparison.raw().items()},
        "left_out": dict(comparison.left_out),
        **({"remarks": dict(comparison.remarks)} if comparison.remarks else {}),
    }


def row_as_dict(row: Row) -> dict[str, object]:
    return {
        "name": row.name,
        "median_seconds": row.median,
        "minimum_seconds": row.minimum,
        "ratio_to_floor": row.ratio,
        "ratio_quartiles": row.quartiles,
    }
