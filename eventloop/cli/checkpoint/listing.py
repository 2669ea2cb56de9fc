"""``trainbus checkpoint ls`` and ``verify``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from eventloop.checkpoint import TEMPORARY_PREFIX, AnyPath, file_kind, outline, store_of, verify, verify_shards
from eventloop.cli.checkpoint.output import Status, check_file, check_kind, printable, say, status_of, to_terminal
from eventloop.errors import CheckpointDamagedError, CheckpointError
from eventloop.training.saves.discover import file_named, read_pointer
from eventloop.training.saves.write import LAST
from eventloop.training.state import how_far

State = Literal["complete", "verified", "damaged", "unreadable", "weights"]

_STYLES: dict[State, str] = {
    "complete": "green",
    "verified": "bold green",
    "damaged": "bold red",
    "unreadable": "bold red",
    "weights": "dim",
}
_BAD: frozenset[State] = frozenset({"damaged", "unreadable"})
_OTHERS = 48
"""Columns that a row takes beside the name, two between any two."""


class Found(msgspec.Struct):
    """A file (several names may be one file), and what was found out about it."""

    names: list[AnyPath]
    status: Status
    state: State = "complete"
    problem: str = ""
    progress: Mapping[str, Any] = {}


def ls(options: argparse.Namespace) -> int:
    """List a directory; 1 if a file is damaged."""
    directory: AnyPath = options.directory
    files = sorted((_examined(found, every_byte=options.verify) for found in _find(directory)), key=_age)
    console = to_terminal()
    text = read_pointer(directory) or None
    newest = None if text is None else file_named(directory, text, [])
    if files:
        console.print(_table(files, newest, console.width))
    else:
        say(console, f"no checkpoints in {directory}")
    if text is not None:
        gone = " (which is not there)" if newest is not None and not newest.exists() else ""
        say(console, ("→ ", "bold"), f"{LAST}: {printable(text)}{gone}")
    for found in files:
        if found.state in _BAD:
            say(console, (found.problem, _STYLES[found.state]))
    for name in sorted(path.name for path, _ in store_of(directory).files(directory)):
        if name.startswith(TEMPORARY_PREFIX) and name.endswith(".tmp"):
            say(console, ("unfinished: ", "yellow"), f"{name}, of a save that was cut off or is under way")
    return int(any(found.state in _BAD for found in files))


def verify_all(options: argparse.Namespace) -> int:
    """Verify files, and all those of directories; 1 if one is damaged."""
    console = to_terminal()
    files: list[Found] = []
    for found in _named(options.paths):
        _examined(found, every_byte=True)
        files.append(found)
        names = " = ".join(printable(str(path)) for path in found.names)
        detail = {
            "verified": f"{names}  {decimal(found.status.bytes)}",
            "weights": f"{names}  plain safetensors, which have no digest",
        }.get(found.state, found.problem)
        say(console, (f"{found.state:10}", _STYLES[found.state]), detail)
    bad = sum(found.state in _BAD for found in files)
    verified = sum(found.state == "verified" for found in files)
    if not verified and not bad:
        raise CheckpointError("nothing to verify")
    if len(files) > 1:
        say(console, f"{verified} of {len(files)} files verified", (f", {bad} damaged" if bad else "", "bold red"))
    return int(bad > 0)


def _named(paths: list[AnyPath]) -> Iterator[Found]:
    """The files that a user has named, and those of directories. To verify none at all is a mistake."""
    for path in paths:
        if path.is_dir():
            files = _find(path)
            if not files:
                raise CheckpointError(f"no checkpoints in {path}")
            yield from files
            continue
        check_file(path)
        check_kind(path)
        yield Found([path], status_of(path))


def _find(directory: AnyPath) -> list[Found]:
    """The checkpoint files of a directory by name, one for all names that a file has."""
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such directory")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; trainbus checkpoint show {directory} looks into it")
    found: dict[object, Found] = {}
    for path, modified in sorted(store_of(directory).files(directory), key=lambda file: _natural(file[0])):
        if path.name.startswith(".") or path.suffix != ".safetensors":
            continue
        try:
            status = status_of(path, modified)
        except OSError:  # removed this very moment, or a link that leads nowhere
            continue
        found.setdefault(status.identity, Found([], status)).names.append(path)
    return list(found.values())


def _age(found: Found) -> tuple[bool, tuple[int, ...], float]:
    """Oldest first: how far the run had come counts, and not when a file was copied here. Files that do not say come last."""
    progress = how_far({"progress": found.progress}) if found.progress else ()
    return not progress, progress, found.status.modified or 0.0


def _natural(path: AnyPath) -> tuple[bool, int, str]:
    """Sort the names of one file so that the regular one comes before ``best_…``, and epoch_9 before epoch_10."""
    return path.name.startswith("best_"), len(path.name), path.name


def _examined(found: Found, *, every_byte: bool) -> Found:
    path = found.names[0]
    try:
        tree = outline(path)
        found.progress = _progress(tree)
        found.state = "complete"
        if every_byte:
            verify(path)
            verify_shards(tree, path)
            found.state = "verified"
    except CheckpointDamagedError as error:
        found.state, found.problem = "damaged", str(error)
        if file_kind(path) == "plain safetensors":
            found.state, found.problem = "weights", ""
    except (CheckpointError, OSError) as error:  # of a newer version; a store that does not answer
        found.state, found.problem = "unreadable", str(error)
    return found


def _progress(tree: Any) -> Mapping[str, Any]:
    progress = tree.get("progress") if isinstance(tree, Mapping) else None
    return progress if isinstance(progress, Mapping) else {}


def _table(files: list[Found], newest: AnyPath | None, width: int) -> Table:
    longest = max(len(found.names[0].name) for found in files)
    gap = 2 if longest + _OTHERS <= width else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    table.add_column("", width=1)
    table.add_column("file", overflow="fold")
    for title in ("epoch", "iter", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("state", no_wrap=True)
    pointed = status_of(newest).identity if newest is not None and newest.exists() else None
    for found in files:
        table.add_row(
            "→" if pointed == found.status.identity else "",
            Text("\n".join(_lines(found.names))),
            _count(found, "epoch"),
            _count(found, "iter"),
            _size(found.status.bytes),
            _when(found.status.modified),
            f"[{_STYLES[found.state]}]{found.state}[/]",
        )
    return table


def _lines(names: list[AnyPath]) -> Iterator[str]:
    yield printable(names[0].name)
    yield from (f"= {printable(path.stem)}" for path in names[1:])


def _count(found: Found, name: str) -> str:
    value = found.progress.get(name)
    return str(value) if isinstance(value, int) and value.bit_length() <= 64 else "-"


def _when(seconds: float | None) -> str:
    """Like ``ls -l``: the time of day within half a year, the year before."""
    if seconds is None:
        return "-"
    recent = abs(time.time() - seconds) < 182 * 86400
    return time.strftime("%b %d %H:%M" if recent else "%b %d  %Y", time.localtime(seconds))


def _size(count: int) -> str:
    text = decimal(count, precision=1)
    return (text if len(text) < len("64.1 kB") else decimal(count, precision=0)).replace("bytes", "B")
