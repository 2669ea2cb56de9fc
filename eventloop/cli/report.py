"""``trainbus report``: one page of HTML about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from eventloop.checkpoint import commit_bytes
from eventloop.cli.common import say
from eventloop.cli.runs import best_metric
from eventloop.errors import ConfigurationError
from eventloop.observe import RunFolderError, find_runs
from eventloop.observe.verdict import size

_GENERATOR = b'content="trainbus report"'


def report(run: Path, /, *runs: Path, output: Annotated[Path | None, Parameter(alias="-o")] = None) -> int:
    """Write a report on a run, or a comparison of several runs: one HTML file that needs no network.

    It has a verdict in plain sentences, the curves, costs, step times, lanes, checkpoints, validations, resumes and stops,
    the environment and the configuration. The run may still be training, or may have been killed.

    Exit status 1: a file of a run is damaged. Damaged lines are left out of the report.

    Args:
        run: the folder of a run.
        runs: folders of further runs to compare.
        output: the file to write; by default report.html in the folder of the run, or in the current folder for several runs.
    """
    from eventloop.observe.report import ReportedRun, build_report, verdict
    from eventloop.observe.report.sentences import count

    folders = list(dict.fromkeys((run, *runs)))
    for folder in folders:
        _check(folder)
    path = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder; name a file in it" if path.is_dir() else f"cannot be written: no folder {path.parent}"
        raise ConfigurationError(f"{path} {what}")
    if output is None and path.is_file() and _GENERATOR not in path.read_bytes()[:4096]:
        raise ConfigurationError(f"{path} exists and is not a report of trainbus; give another file with -o, or move it away")
    reported = [ReportedRun(folder) for folder in folders]
    page = build_report(reported, best_metric)
    try:
        commit_bytes(path, page)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another file with -o") from error
    for one in reported if len(reported) == 1 else ():
        for sentence in verdict(one, best_metric):
            say(sentence)
    damaged = [(one.path / name, damage) for one in reported for name, damage in one.damaged.items()]
    for file, damage in damaged:
        say((f"{file}: {count(damage.lines, 'damaged line')} left out, the first is line {damage.first}", "red"))
    say(f"{path} ({size(len(page))}): open it in a browser")
    return 1 if damaged else 0


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder; list the runs in runs/ by: trainbus runs")
    if (found := find_runs(folder)) and found != [folder]:
        names = ", ".join(str(one) for one in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunFolderError(f"{folder}: not the folder of a run, but it contains some; give one of {names}{more}")
