"""What differs between runs: the facts of each as columns of one table, for ``trainbus runs`` and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from trainbus.observe.record import Evaluation, Test, Validation
from trainbus.observe.run_folder import RunFolder
from trainbus.observe.story import RunStory

Row = dict[str, Any]
"""The facts of a run by name; a fact that it does not have is absent."""


def settings_of(story: RunStory) -> Row:
    """Return what was set in the last session of a run, by dotted name: its settings, its ``config=``, its environment.

    A key of ``config=`` that has the name of a setting is absent if it has its value, too, else ``config.NAME``.
    """
    row: Row = {}
    if story.sessions:
        last = story.sessions[-1]
        where = last.environment
        row |= last.settings
        row |= {name: value for name, value in where.versions.items() if name not in row}
        row |= {"host": where.machine.host, "gpus": ", ".join(where.machine.gpus), "command": " ".join(where.command)}
        row |= {} if where.git is None else {"commit": where.git.commit[:10], "changed": not where.git.clean}
    for name, value in flat(story.manifest.config):
        if name not in row:
            row[name] = value
        elif row[name] != value:
            row[f"config.{name}"] = value
    return row


def metrics_of(run: RunFolder, story: RunStory, best: Mapping[str, str]) -> Row:
    """Return the metrics of a run: of its validations the best value, ``test/NAME`` and ``train/NAME`` the last ones.

    ``best`` says whether the ``"greater"`` or the ``"less"`` value of a metric is better; of others the last one counts.
    """
    row: Row = {}
    for line in story.of(Evaluation):
        for name, value in line.metrics.items():
            if value != value:
                continue  # NaN is never better
            if isinstance(line, Test):
                row[f"test/{name}"] = value
            elif isinstance(line, Validation):
                choose = {"greater": max, "less": min}.get(best.get(name, ""))
                row[name] = value if choose is None or name not in row else choose(row[name], value)
    return row | {name: value for name, value in run.last_scalars().items() if name.startswith("train/")}


def began(story: RunStory) -> str:
    """Return when a run began, in local time, such as ``2026-11-26 14:05:09``; empty if unknown."""
    if not story.sessions:
        return ""
    return datetime.fromtimestamp(story.sessions[0].began).isoformat(" ", "seconds")


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree of mappings by dotted name."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from flat(entry, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, value


def differing(rows: Sequence[Row]) -> list[str]:
    """Return the names of the facts in which runs differ, in their order.

    A fact that some runs lack is left out if the lack is that of another one: the options of a hook that they do not have. Of
    columns with the same values, the first is named. Runs without any facts are not compared.
    """
    rows = [row for row in rows if row]
    found: dict[tuple[str, ...], str] = {}
    varies: set[str] = set()
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [repr(row[name]) for row in rows if name in row]
        above = name.split(".")
        is_within = any(".".join(above[:depth]) in varies for depth in range(1, len(above)))
        if len(set(values)) > 1 or (len(values) < len(rows) and not is_within):
            varies.add(name)
            found.setdefault(tuple(repr(row.get(name, "")) for row in rows), name)
    return list(found.values())


def is_shown(name: str) -> bool:
    """Return False for a setting that is too long for a column, or what the run is called."""
    return name != "command" and name.rpartition(".")[2] != "work_dir"


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the ends of dotted names, where no other name has the same end; else the whole names."""
    names = dict.fromkeys(names)
    ends = Counter(end for name in names for end in {name, name.rpartition(".")[2]})
    return {name: end if ends[end := name.rpartition(".")[2]] == 1 else name for name in names}
