"""``trainbus runs``: list runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from rich import filesize
from rich.table import Table
from rich.text import Text

from eventloop.cli.common import printable, say, to_terminal
from eventloop.errors import ConfigurationError
from eventloop.observe import RunFolder, RunFolderError, find_runs

_STYLES = {"running": "green", "failed": "red", "killed": "red", "interrupted": "yellow"}


def list_runs(folder: Path = Path("runs"), /) -> int:
    """List the runs in a folder: state, epochs, best metric, time and size of the files.

    A run is listed if its folder has the run.json of a RunRecordHook, or a scalars.jsonl. Exit status 1: a run.json is damaged.

    Args:
        folder: where to look; in its subfolders, too.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; give the folder that has your runs")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run")
    table.add_column("state", no_wrap=True)
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    for column in ("time", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    damaged = []
    for path in find_runs(folder):
        try:
            table.add_row(*_row(RunFolder(path), folder))
        except RunFolderError as error:
            damaged.append(str(error))
    if table.row_count:
        to_terminal().print(table)
    elif not damaged:
        say(f"no runs in {folder}")
    for message in damaged:
        say((message, "red"))
    return 1 if damaged else 0


def _row(run: RunFolder, folder: Path) -> tuple[str | Text, ...]:
    facts = run.facts()
    name = printable(str(run.path.relative_to(folder)) if run.path != folder else run.path.name)
    size = filesize.decimal(sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file()))
    best = _best([line["metrics"] for line in run.record() if line.get("kind") == "validation"])
    if not facts.sessions:
        return name, "unknown", "", best, "", size
    last = facts.sessions[-1]
    shown = Text(last.state_now, style=_STYLES.get(last.state_now, ""))
    return name, shown, str(last.epoch), best, str(timedelta(seconds=round(run.seconds()))), size


def _best(validations: Sequence[Mapping[str, float]]) -> str:
    """Return the best value of the first metric that is known to be better if greater, else of one better if less."""
    from hooks.rules import Rule, find_rule, is_better

    rules: dict[str, Rule] = {}
    for name in dict.fromkeys(name for metrics in validations for name in metrics):
        with suppress(ConfigurationError):  # the name does not tell
            rules[name] = find_rule(name)
    chosen = next((name for name, rule in rules.items() if rule == "greater"), next(iter(rules), None))
    if chosen is None:
        return ""
    best: float | None = None
    for metrics in validations:
        if chosen in metrics and is_better(rules[chosen], float(metrics[chosen]), best):
            best = float(metrics[chosen])
    return "" if best is None else f"{chosen} {best:.4g}"
