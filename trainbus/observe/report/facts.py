"""List the environment and the configuration of runs as rows of text, and the rows in which runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainbus.observe.compared import flat
from trainbus.observe.environment import Environment
from trainbus.observe.report.reported_run import ReportedRun
from trainbus.observe.verdict import size

_MOST = 2_000  # characters of one value


def environment_rows(run: ReportedRun) -> dict[str, str]:
    """Return the machine, process and software of a run's last session; empty without ``run.json``."""
    if not run.story.sessions:
        return {}
    last = run.story.sessions[-1]
    where: Environment = last.environment
    machine, git = where.machine, where.git
    changed = "" if git is None or git.clean else ", with changes that were not committed"
    rows = {
        "command": " ".join(where.command),
        "folder": where.folder,
        "git commit": "none" if git is None else f"{git.commit} ({git.branch}){changed}",
        "machine": machine.host,
        "system": machine.system,
        "processor": f"{machine.processor}, {machine.cores} cores usable",
        "memory": size(machine.memory),
        "GPUs": ", ".join(machine.gpus) or "none",
        "processes": str(last.world_size),
        "seed": "none" if run.story.manifest.seed is None else str(run.story.manifest.seed),
    }
    return {name: shortened(value) for name, value in (rows | where.versions).items()}


def configuration_rows(run: ReportedRun) -> dict[str, str]:
    """Return the settings of a run and its ``config=`` with dotted keys, such as ``loop.max_epochs``."""
    own = run.story.sessions[-1].settings if run.story.sessions else {}
    return {name: shortened(text_of(value)) for name, value in [*own.items(), *flat(run.story.manifest.config)]}


def differences(rows: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the rows that are not the same in all runs; a run without such a row has an empty text."""
    names = dict.fromkeys(name for own in rows for name in own)
    found = {name: [own.get(name, "") for own in rows] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def shortened(value: str) -> str:
    """Return a text cut to the length that fits the page."""
    return value if len(value) <= _MOST else f"{value[:_MOST]}… ({len(value):,} characters)"


def text_of(value: Any) -> str:
    """Return a setting as text."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list):
        return f"[{', '.join(text_of(entry) for entry in value)}]"
    return str(value)
