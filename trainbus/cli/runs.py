"""``trainbus runs``: list runs, choose and sort them by what was set and what came out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich import filesize
from rich.console import Console
from rich.table import Table

from trainbus.cli.columns import Condition, column_named, matches, ordered, parse
from trainbus.cli.common import RUNS, say, to_terminal, write_json
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.terminal import cell
from trainbus.observe import RunFolder, RunFolderError, find_runs
from trainbus.observe.compared import Row, began, differing, is_shown, metrics_of, settings_of, short_names
from trainbus.observe.record import Validation
from trainbus.observe.run_folder import bytes_in
from trainbus.observe.states import RunStatus

_STYLES = {RunStatus.RUNNING: "green", RunStatus.FAILED: "red", RunStatus.KILLED: "red", RunStatus.INTERRUPTED: "yellow"}
_FIRST, _LAST = ("run", "state", "epochs"), ("best", "time", "size")
_TEXTS = ("run", "state", "best", "began")


def list_runs(
    folder: Path = RUNS,
    /,
    *,
    where: Annotated[list[str] | None, Parameter(alias="-w")] = None,
    sort: str | None = None,
    reverse: bool = False,
    columns: str | None = None,
    json: bool = False,
) -> int:
    """List the runs in a folder: state, epochs, the settings that differ, best metric, time and size of the files.

    A run is listed if its folder has the run.json of a RunRecordHook, or a scalars.jsonl. Exit status 1: a run.json is damaged.

    A column is run, state, epochs, iterations, began, time, size, a metric such as accuracy or train/loss, a setting such as
    lr, batch_size or hooks.EMAHook.momentum, or a key of config=. The end of a dotted name is enough if it is the only one.

    Args:
        folder: the folder to search, with its subfolders.
        where: list only runs for which this is true, such as "lr<0.01", "optimizer=AdamW", "state!=failed", "time>1h" or
            "began>2026-11-01". Several are joined by and.
        sort: the column to sort by. Metrics begin with the best run, others with the least value; runs without it are last.
        reverse: sort the other way round.
        columns: the columns to show, with commas between them.
        json: write all columns (or those of --columns) as JSON, times in seconds and sizes in bytes.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; name the folder that contains your runs")
    conditions = [parse(text) for text in where or ()]
    found, damaged = _read(find_runs(folder), folder)
    known = list(dict.fromkeys(name for one in found for name in one))
    rows, asked = _chosen(found, known, conditions), []
    if sort is not None and found:
        asked.append(name := column_named(sort, known))
        rows = ordered(rows, name, greatest=(rules_of([name]).get(name) == "greater") != reverse)
    elif reverse:
        rows.reverse()
    if found and columns is not None:
        shown = [column_named(name.strip(), known) for name in columns.split(",") if name.strip()]
        shown = shown if "run" in shown or json else ["run", *shown]
    else:
        shown = []
    errors = Console(stderr=True, highlight=False) if json else to_terminal()
    if json:
        listed = [{name: row[name] for name in shown if name in row} if shown else row for row in rows]
        write_json(listed)
    elif rows:
        _show(rows, shown, list(dict.fromkeys([*asked, *(column_named(one.name, known) for one in conditions)])))
    elif found:
        say(f"none of {len(found)} runs in {folder} matches {' and '.join(where or ())}")
    elif not damaged:
        say(f"no runs in {folder}")
    for message in damaged:
        say((message, "red"), console=errors)
    return 1 if damaged else 0


def show_best(runs: Iterable[Path], folder: Path) -> None:
    """Print the table of runs in a folder, the best one first, and which that is, if a metric's name implies it."""
    rows, damaged = _read(runs, folder)
    rules = rules_of(name for row in rows for name in list(row)[: list(row).index("path")])
    metric = next((name for name, rule in rules.items() if rule == "greater"), next(iter(rules), None))
    if metric is not None:
        rows = ordered(rows, metric, greatest=rules[metric] == "greater")
    if rows:
        _show(rows, [], [] if metric is None else [metric])
    if metric is not None:
        say(f"best {metric}: {_text(metric, rows[0])}, {rows[0]['run']}")
    for message in damaged:
        say((message, "red"))


def _read(runs: Iterable[Path], folder: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of runs in a folder, and messages about damaged ones."""
    rows, damaged = [], []
    for path in runs:
        try:
            rows.append(_row(RunFolder(path), folder))
        except RunFolderError as error:
            damaged.append(str(error))
    return rows, damaged


def _row(run: RunFolder, folder: Path) -> Row:
    story = run.story()
    row: Row = {"run": str(run.path.relative_to(folder)) if run.path != folder else run.path.name, "state": str(story.state)}
    if story.sessions:
        row["epochs"], row["iterations"] = story.came_to
        row |= {"began": began(story), "time": story.seconds}
    validations = [line.metrics for line in story.of(Validation)]
    if (best := best_metric(validations)) is not None:
        row["best"] = best[0]
    row["size"] = bytes_in(run.path)
    metrics = metrics_of(run, story, rules_of(name for metrics in validations for name in metrics))
    taken = {*row, *metrics}
    settings = {f"config.{name}" if name in taken else name: value for name, value in settings_of(story).items()}
    return row | metrics | {"path": str(run.path)} | settings


def _chosen(found: Sequence[Row], known: Sequence[str], conditions: Sequence[Condition]) -> list[Row]:
    rows = list(found)
    for one in conditions if found else ():
        name = column_named(one.name, known)
        rows = [row for row in rows if matches(one, name, row)]
    return rows


# -------------------------------------------------------------------------------------------------------------- the table


def _show(rows: Sequence[Row], shown: Sequence[str], asked: Sequence[str]) -> None:
    """Print a table, by default of the columns that were asked for and of those that differ, as many as fit the width."""
    console = to_terminal()
    heads = short_names(name for row in rows for name in row)  # --columns understands them
    left_out: list[str] = []
    if not shown:
        differ = [name for name in differing([*map(_settings, rows)]) if is_shown(name) and name not in asked]
        shown, left_out = _fitting(rows, heads, asked, differ, console.width if console.is_terminal else math.inf)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in shown:
        is_text = name in _TEXTS or any(isinstance(row.get(name), str) for row in rows)
        table.add_column(cell(heads.get(name, name)), justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(_text(name, row), _STYLES.get(row["state"], "") if name == "state" else "") for name in shown))
    if not console.is_terminal:
        console = Console(highlight=False, width=max(200, _width(rows, heads, shown)))
    console.print(table)
    if left_out:
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        say((f"They also differ in {', '.join(left_out[:5])}{more}: choose them by --columns", "dim"))


def _fitting(
    rows: Sequence[Row], heads: Mapping[str, str], asked: Sequence[str], differ: Sequence[str], width: float
) -> tuple[list[str], list[str]]:
    """Return the columns that fit a width, and the names of those that do not.

    The best metric has no column of its own if the table is sorted by it. If not all columns fit, size is left out first.
    """
    extra = [name for name in asked if name not in (*_FIRST, *_LAST)]
    is_best = any(row.get("best", "").startswith(f"{name} ") for row in rows for name in extra)
    last = [name for name in _LAST if name != "best" or not is_best]
    if _width(rows, heads, [*_FIRST, *extra, *differ, *last]) > width and "size" not in asked:
        last.remove("size")
    number = len(differ)
    while number and _width(rows, heads, [*_FIRST, *extra, *differ[:number], *last]) > width:
        number -= 1
    return [*_FIRST, *extra, *differ[:number], *last], [heads[name] for name in differ[number:]]


def _settings(row: Row) -> Row:
    """Return what was set in a run: what stands behind its path."""
    names = list(row)
    return {name: row[name] for name in names[names.index("path") + 1 :]}


def _width(rows: Sequence[Row], heads: Mapping[str, str], names: Sequence[str]) -> int:
    return sum(max(len(heads.get(name, name)), *(len(_text(name, row)) for row in rows)) + 2 for name in names)


def _text(name: str, row: Row) -> str:
    """Return a value as a table shows it."""
    value = row.get(name, "")
    match name:
        case "size":
            return filesize.decimal(value)
        case "time" if value != "":
            return str(timedelta(seconds=round(value)))
    return _plain_text(value)


def _plain_text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case list():
            return ",".join(map(_plain_text, value))
    return str(value)


def rules_of(names: Iterable[str]) -> dict[str, str]:
    """Return ``"greater"`` or ``"less"`` for the metrics whose names imply it."""
    from trainbus.hooks.rules import find_rule

    rules: dict[str, str] = {}
    for name in dict.fromkeys(names):
        with suppress(ConfigurationError):  # the name implies neither
            rules[name] = find_rule(name)
    return rules


def best_metric(validations: Sequence[Mapping[str, float]]) -> tuple[str, int] | None:
    """Return the best value of a metric, such as ``"accuracy 0.97"``, and the index of its validation.

    It is the first metric whose name implies that more is better, else the first for which less is; None without any.
    """
    from trainbus.hooks.rules import is_better

    rules: Any = rules_of(name for metrics in validations for name in metrics)
    chosen = next((name for name, rule in rules.items() if rule == "greater"), next(iter(rules), None))
    best: tuple[float, int] | None = None
    for index, metrics in enumerate(validations):
        value = metrics.get(chosen or "", math.nan)
        if chosen is not None and is_better(rules[chosen], value, None if best is None else best[0]):
            best = value, index
    return None if best is None else (f"{chosen} {best[0]:.4g}", best[1])
