"""``trainbus report``: one page of HTML about runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from trainbus.cli.common import RUNS, say, to_terminal, write_json
from trainbus.cli.runs import best_metric, rules_of, show_best
from trainbus.eventloop.checkpoint import commit_bytes
from trainbus.eventloop.errors import ConfigurationError
from trainbus.observe import RunFolderError, find_runs
from trainbus.observe.run_folder import newest_run
from trainbus.observe.verdict import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainbus.observe.report import ReportedRun

_GENERATOR = b'content="trainbus report"'


def report(*runs: Path, output: Annotated[Path | None, Parameter(alias="-o")] = None, json: bool = False) -> int:
    """Write a report on a run, or a comparison of several runs: one HTML file that needs no network.

    It has a verdict in plain sentences, the curves, costs, step times, lanes, checkpoints, validations, resumes and stops,
    the environment and the configuration. The run may still be training, or may have been killed. The command prints the
    verdict; of several runs the table, and which of them is the best.

    Exit status 1: a file of a run is damaged. Damaged lines are left out of the report, and so is a run whose run.json is
    damaged, if others remain.

    Args:
        runs: folders of runs to compare, or folders that contain runs, also in their subfolders; without any, the newest run
            in runs/.
        output: the file to write; by default report.html in the folder of the run, or in the current folder for several runs.
        json: print the verdict, the settings and the metrics of each run as JSON.
    """
    from trainbus.observe.report import build_report, summaries, verdict
    from trainbus.observe.report.sentences import count

    folders = list(dict.fromkeys(one for folder in runs or [_newest()] for one in _runs_in(folder)))
    path = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder; name a file in it" if path.is_dir() else f"cannot be written: no folder {path.parent}"
        raise ConfigurationError(f"{path} {what}")
    if output is None and path.is_file() and _GENERATOR not in path.read_bytes()[:4096]:
        raise ConfigurationError(f"{path} exists and is not a report of trainbus; give another file with -o, or move it away")
    reported, unreadable = _read(folders)
    page = build_report(reported, best_metric, rules_of)
    try:
        commit_bytes(path, page)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another file with -o") from error
    if json:
        write_json({"path": str(path), "bytes": len(page), "runs": summaries(reported, best_metric, rules_of)})
    elif len(reported) == 1:
        for sentence in verdict(reported[0], best_metric):
            say(sentence)
    else:
        paths = [one.path.absolute() for one in reported]
        show_best(paths, Path(os.path.commonpath(paths)))
    errors = Console(stderr=True, highlight=False) if json else to_terminal()
    damaged = [(one.path / name, damage) for one in reported for name, damage in one.damaged.items()]
    for message in unreadable:
        say((message, "red"), console=errors)
    for file, damage in damaged:
        say(
            (f"{file}: {count(damage.lines, 'damaged line')} left out, the first is line {damage.first}", "red"), console=errors
        )
    if not json:
        say(f"{path} ({size(len(page))}): open it in a browser")
    return 1 if damaged or unreadable else 0


def _read(folders: Sequence[Path]) -> tuple[list[ReportedRun], list[str]]:
    """Return the runs, and messages about those that cannot be read. Raise RunFolderError if none can."""
    from trainbus.observe.report import ReportedRun

    found, errors = [], []
    for folder in folders:
        try:
            found.append(ReportedRun(folder))
        except RunFolderError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found, [str(error) for error in errors]


def _newest() -> Path:
    """Return the newest run in the folder of runs."""
    found = newest_run(find_runs(RUNS)) if RUNS.is_dir() else None
    if found is None:
        raise ConfigurationError(f"there is no run in {RUNS.absolute()}; name the folder of one: trainbus report RUN")
    return found


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder; the folder itself if it contains none, because its run may have nothing but logs."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; list the runs in runs/ by: trainbus runs")
    return find_runs(folder) or [folder]
