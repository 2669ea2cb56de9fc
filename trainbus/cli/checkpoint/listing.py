"""``trainbus checkpoint ls`` and ``verify``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import msgspec
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from trainbus.cli.common import FileOrURL, check_checkpoint, say, status_of, to_terminal, write_json
from trainbus.eventloop.checkpoint import (
    TEMPORARY_PREFIX,
    AnyPath,
    file_kind,
    inspect,
    list_files,
    plain_tree,
    read_scores,
    read_shards,
    sharded_in,
    verify,
    verify_shards,
)
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.platform import portable_name
from trainbus.eventloop.terminal import printable
from trainbus.eventloop.training.saves.discover import file_named, is_candidate, newest_first, read_pointer
from trainbus.eventloop.training.schema import LAST, how_far

_STYLES = {"complete": "green", "verified": "bold green", "damaged": "bold red", "unreadable": "bold red", "weights": "dim"}


class Found(msgspec.Struct):
    """A file with all its names, its size, state and progress."""

    names: list[AnyPath]
    bytes: int
    modified: float | None
    state: Literal["complete", "verified", "damaged", "unreadable", "weights"] = "complete"
    problem: str = ""  # why it is damaged or unreadable
    progress: tuple[int, ...] = ()  # iteration, epoch …; () if unknown, or if the file does not hold the state of a run
    scores: dict[str, Any] = {}  # the metrics of the validation of its own state, if it had one


def ls(directory: FileOrURL, /, *, verify: bool = False, json: bool = False) -> int:
    """List the checkpoints of a directory: their progress, scores, the newest one, and all names of each file.

    The score is of the validation of the file's own weights: the metric that it is the best by, or else the first.

    Args:
        directory: a directory, or its URL, such as s3://bucket/run.
        verify: read every byte and check the digests, not only the headers.
        json: print JSON: a list of files, sizes in bytes, times in Unix seconds.
    """
    files = [_examined(found, every_byte=verify) for found in _find(directory)]
    known = read_scores(directory) if files else {}
    for found in files if known else ():
        with suppress(CheckpointError, OSError):  # damaged, which it is listed as
            if (scored := known.get(inspect(found.names[0]).digest)) is not None:
                found.scores = scored.metrics
    files.sort(key=lambda found: (not found.progress, found.progress, found.modified or 0.0))
    text = read_pointer(directory)
    newest = file_named(directory, text, []) if text else None
    if json:
        taken = _newest(files, newest)
        write_json([_as_json(found, newest=taken in found.names, scores=found.scores) for found in files])
        return int(any(found.problem for found in files))
    if files:
        to_terminal().print(_table(files, _newest(files, newest)))
    else:
        say(f"no checkpoints in {directory}")
    if text:
        gone = " (missing)" if newest is not None and not newest.exists() else ""
        say(("→ ", "bold"), f"{LAST}: {printable(text)}{gone}")
    bad = [found for found in files if found.problem]
    for found in bad:
        say((found.problem, _STYLES[found.state]))
    for name in sorted(path.name for path, _ in list_files(directory)):
        if name.startswith(TEMPORARY_PREFIX) and name.endswith(".tmp"):
            say(("unfinished: ", "yellow"), f"{name}, from a save that was killed or is still running")
    return int(bool(bad))


def verify_all(path: FileOrURL, /, *more: FileOrURL, json: bool = False) -> int:
    """Read every byte of checkpoints and check their digests.

    Args:
        path: a checkpoint, a directory, or a URL of one.
        more: further checkpoints, directories or URLs.
        json: print JSON, as checkpoint ls does.
    """
    if json:
        files = [_examined(found, every_byte=True) for found in _named([path, *more])]
        write_json([_as_json(found) for found in files])
        return int(any(found.problem for found in files))
    states: Counter[str] = Counter()
    for found in _named([path, *more]):
        _examined(found, every_byte=True)
        states[found.state] += 1
        names = " = ".join(printable(str(path)) for path in found.names)
        fine = "plain safetensors, without digests" if found.state == "weights" else decimal(found.bytes)
        say((f"{found.state:10}", _STYLES[found.state]), found.problem or f"{names}  {fine}")
    bad = states["damaged"] + states["unreadable"]
    if not states["verified"] and not bad:
        raise CheckpointError("nothing to verify: plain safetensors have no digests")
    if states.total() > 1:
        damaged = (f", {bad} damaged" if bad else "", "bold red")
        say(f"{states['verified']} of {states.total()} files verified", damaged)
    return int(bad > 0)


def _as_json(found: Found, **more: Any) -> dict[str, Any]:
    iteration, epoch = (*found.progress, None, None)[:2]
    return {
        "names": [*map(str, found.names)],
        "state": found.state,
        "epoch": epoch,
        "iter": iteration,
        "bytes": found.bytes,
        "modified": found.modified,
        "problem": found.problem,
        **more,
    }


def _named(paths: list[AnyPath]) -> Iterator[Found]:
    """Yield the named files, and the files of named directories; a directory without checkpoints is an error."""
    for path in paths:
        if not path.is_dir():
            check_checkpoint(path)
            yield Found([path], *status_of(path)[1:])
        elif files := _find(path):
            yield from files
        else:
            raise CheckpointError(f"no checkpoints in {path}")


def _find(directory: AnyPath) -> list[Found]:
    """Return the checkpoint files of a directory with all names of each: regular before ``best_…``, 9 before 10."""
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such directory")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file, not a directory; show it by: trainbus checkpoint show {directory}")
    found: dict[object, Found] = {}
    files = list_files(directory)
    for path, modified in sorted(files, key=lambda one: (one[0].name.startswith("best_"), len(one[0].name), one[0].name)):
        if is_candidate(path):
            with suppress(OSError):  # removed meanwhile, or a broken link
                identity, size, changed = status_of(path, modified)
                found.setdefault(identity, Found([], size, changed)).names.append(path)
    return list(found.values())


def _examined(found: Found, *, every_byte: bool) -> Found:
    path = found.names[0]
    try:
        tree = plain_tree(path)
        found.progress = how_far(tree)
        if every_byte:
            verify(path)
            verify_shards(tree, path)
            found.state = "verified"
        elif sharded_in(tree) is not None:
            read_shards(tree, path)
    except CheckpointDamagedError as error:
        if file_kind(path) == "plain safetensors":
            found.state = "weights"
        else:
            found.state, found.problem = "damaged", str(error)
    except (CheckpointError, OSError) as error:  # such as a newer format, or a store that does not answer
        found.state, found.problem = "unreadable", str(error)
    return found


def _table(files: list[Found], newest: AnyPath | None) -> Table:
    scores = {id(found): _score(found) for found in files}
    titles = ("epoch", "iter", *(["score"] if any(scores.values()) else []), "size")
    numbers = [Column(title, justify="right", no_wrap=True) for title in titles]
    columns = [Column(), Column("file", overflow="fold"), *numbers, Column("when", no_wrap=True), Column("state", no_wrap=True)]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for found in files:
        first, *others = found.names
        counts = [str(count) if count.bit_length() <= 64 else "-" for count in found.progress[1::-1]] or ["-", "-"]
        table.add_row(
            "→" if newest in found.names else "",
            Text("\n".join([printable(first.name), *(f"= {printable(path.stem)}" for path in others)])),
            *counts,
            *([printable(scores[id(found)])] if "score" in titles else []),
            decimal(found.bytes, precision=1).replace("bytes", "B"),
            _when(found.modified),
            f"[{_STYLES[found.state]}]{found.state}[/]",
        )
    return table


def _score(found: Found) -> str:
    """Return the metric that a file is the best by, or else the first, with its value."""
    if not found.scores:
        return ""
    names = [path.name for path in found.names]
    best = (metric for metric in found.scores if any(name.startswith(f"best_{portable_name(metric)}_") for name in names))
    metric = next(best, next(iter(found.scores)))
    value = found.scores[metric]
    return f"{metric} {value:.4g}" if isinstance(value, float) else f"{metric} {value}"


def _newest(files: list[Found], named: AnyPath | None) -> AnyPath | None:
    """Return the file that ``resume="auto"`` takes."""
    known = {path: found for found in files for path in found.names}
    order = newest_first(
        {path: found.modified for path, found in known.items()},
        [] if named not in known else [named],
        lambda path: None if known[path].problem else known[path].progress,
    )
    return next((path for path in order if known[path].progress and not known[path].problem), None)


def _when(seconds: float | None) -> str:
    """Format a time like ``ls -l``: with the time of day in the last half year, else with the year."""
    if seconds is None:
        return "-"
    recent = abs(time.time() - seconds) < 182 * 86400
    return time.strftime("%b %d %H:%M" if recent else "%b %d  %Y", time.localtime(seconds))
