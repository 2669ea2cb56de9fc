"""``trainbus runs``: list runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from stat import S_ISREG

from rich import filesize
from rich.table import Table
from rich.text import Text

from eventloop.cli.common import say, to_terminal
from eventloop.errors import ConfigurationError
from eventloop.observe import RunFolder, RunFolderError, find_runs
from eventloop.observe.record import Validation
from eventloop.observe.states import RunStatus
from eventloop.terminal import cell

_STYLES = {RunStatus.RUNNING: "green", RunStatus.FAILED: "red", RunStatus.KILLED: "red", RunStatus.INTERRUPTED: "yellow"}


def list_runs(folder: Path = Path("runs"), /) -> int:
    """List the runs in a folder: state, epochs, best metric, time and size of the files.

    A run is listed if its folder has the run.json of a RunRecordHook, or a scalars.jsonl. Exit status 1: a run.json is damaged.

    Args:
        folder: the folder to search, with its subfolders.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; name the folder that contains your runs")
    table = Table("run", box=None, padding=(0, 2, 0, 0))
    for column in ("state", "epochs", "best", "time", "size"):
        table.add_column(column, justify="left" if column in ("state", "best") else "right", no_wrap=True)
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
    story = run.story()
    name = cell(str(run.path.relative_to(folder)) if run.path != folder else run.path.name)
    size = filesize.decimal(_bytes(run.path))
    found = best_metric([line.metrics for line in story.of(Validation)])
    best = cell("" if found is None else found[0])
    state = Text(story.state, style=_STYLES.get(story.state, ""))
    if not story.sessions:
        return name, state, "", best, "", size
    last = story.sessions[-1]
    epoch = max([last.epoch, *(line.epoch for line in story.lines if line.time >= last.began)])
    return name, state, str(epoch), best, str(timedelta(seconds=round(story.seconds))), size


def _bytes(folder: Path) -> int:
    """Return the size of the files in a folder, without files that a run removes meanwhile or that cannot be read."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            status = file.lstat()
            total += status.st_size if S_ISREG(status.st_mode) else 0
    return total


def best_metric(validations: Sequence[Mapping[str, float]]) -> tuple[str, int] | None:
    """Return the best value of a metric, such as ``"accuracy 0.97"``, and the index of its validation.

    It is the first metric whose name implies that more is better, else the first for which less is; None without any.
    """
    from hooks.rules import Rule, find_rule, is_better

    rules: dict[str, Rule] = {}
    for name in dict.fromkeys(name for metrics in validations for name in metrics):
        with suppress(ConfigurationError):  # the name implies neither
            rules[name] = find_rule(name)
    chosen = next((name for name, rule in rules.items() if rule == "greater"), next(iter(rules), None))
    best: tuple[float, int] | None = None
    for index, metrics in enumerate(validations):
        value = metrics.get(chosen or "", math.nan)
        if chosen is not None and is_better(rules[chosen], value, None if best is None else best[0]):
            best = value, index
    return None if best is None else (f"{chosen} {best[0]:.4g}", best[1])
