"""Read the files of a run's folder, also of a killed run: ``run.json``, ``record.jsonl``, ``scalars.jsonl``, ``media.jsonl``.

``run.json`` describes the run and each session in which it trained. ``record.jsonl`` has one line per event, such as
``{"time": 1764000000.5, "kind": "checkpoint", "epoch": 3, "iter": 400, ...}``.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import msgspec
import orjson

from trainbus.eventloop.bounds import LATEST
from trainbus.eventloop.checkpoint import commit_bytes
from trainbus.eventloop.errors import TrainbusError
from trainbus.eventloop.plain import as_json, encodable
from trainbus.eventloop.user_errors import contextmanager
from trainbus.hooks.writers.media import MEDIA, PICTURES, PLACES, SCALARS, AnyReported
from trainbus.observe.media import read_reported
from trainbus.observe.record import AnyLine, read_line
from trainbus.observe.story import RunManifest, RunSession, RunStory

if TYPE_CHECKING:
    from trainbus.observe.curves import Curve

MANIFEST: Final = "run.json"
"""Name of the file that describes a run."""
RECORD: Final = "record.jsonl"
"""Name of the file with the events of a run, one JSON object a line."""

_MOST: Final = 16 << 20  # bytes of run.json, and of one line of the other files; what is longer is damaged
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_DEEPEST: Final = 100  # levels of a configuration; what is deeper is damaged

T = TypeVar("T")


class RunFolderError(TrainbusError):
    """A folder is not the folder of a run."""


class RunDamagedError(RunFolderError):
    """A file of a run cannot be read."""


class Damage(msgspec.Struct):
    """Unreadable lines of a file: how many, and the number of the first one, from 1."""

    lines: int
    first: int


class RunFolder:
    """Read the folder of a run. Damaged lines are skipped and counted in ``damaged``, by file name.

    Args:
        path: the work dir.

    Raises:
        RunFolderError: the folder has neither ``run.json`` nor ``scalars.jsonl``.
        RunDamagedError: the folder cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: dict[str, Damage] = {}
        if not is_run(path):
            if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
                raise RunDamagedError(f"{path} cannot be read: permission denied")
            raise RunFolderError(f"{path}: not the folder of a run: it has no {MANIFEST}, {SCALARS} or {MEDIA}")

    def manifest(self) -> RunManifest:
        """Return the content of ``run.json``; without the file, only the name of the run."""
        return read_manifest(self.path) or RunManifest(name=self.path.name)

    def story(self) -> RunStory:
        """Return what happened in the run."""
        manifest = self.manifest()
        sessions = manifest.sessions
        seen = () if not sessions or sessions[-1].ended is not None else self._places()
        return RunStory(manifest, self.lines(), self._ends(sessions), seen)

    def record(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``record.jsonl``."""
        return self._lines(RECORD, _decoded)

    def lines(self) -> Iterator[AnyLine]:
        """Yield the lines of ``record.jsonl`` of known kinds, as objects."""
        return self._lines(RECORD, lambda line: read_line(_decoded(line)))

    def scalars(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``scalars.jsonl``. The later one of two lines with the same step counts."""
        return self._lines(SCALARS, _decoded)

    def media(self) -> Iterator[AnyReported]:
        """Yield the lines of ``media.jsonl`` of known kinds, as objects."""
        return self._lines(MEDIA, lambda line: read_reported(_decoded(line)))

    def picture(self, file: str, most: int) -> bytes | None:
        """Return the PNG of a reported image; None if it is missing, larger than ``most`` bytes, or no PNG."""
        path = self.path / PICTURES / Path(file).name
        with suppress(OSError, RunDamagedError), _opened(path) as opened:
            content = opened.read(most + 1)
            return content if len(content) <= most and content.startswith(_PNG) else None
        return None

    def last_scalars(self) -> dict[str, float]:
        """Return the last value of each scalar at the end of ``scalars.jsonl``, by its name, such as ``train/loss``."""
        found: dict[str, float] = {}
        for line in _tail(self.path / SCALARS):
            found |= {name: value for name, value in line.items() if name not in PLACES and isinstance(value, int | float)}
        return found

    def _places(self) -> Iterator[tuple[float, int, int]]:
        """Yield time, completed epochs and iterations of the lines at the end of ``scalars.jsonl``."""
        for line in _tail(self.path / SCALARS):
            time, epoch, iteration = (line.get(name) for name in ("time", "epoch", "iter"))
            if isinstance(time, int | float) and isinstance(epoch, int) and isinstance(iteration, int):
                trains = any(name.startswith("train/") for name in line)  # the present epoch counts there
                yield time, epoch - trains, iteration

    def curves(self) -> dict[str, Curve]:
        """Return the curve of each scalar, by its name, without what the run abandoned."""
        from trainbus.observe.curves import read_curves

        return read_curves(self.scalars(), RunStory(lines=self.lines()).cuts)

    def _ends(self, sessions: Sequence[RunSession]) -> list[float]:
        """Return the end of each session, in seconds since 1970. A killed session ends with its last line in a file."""
        following = [*(one.began for one in sessions), math.inf][1:]
        killed = [index for index, one in enumerate(sessions) if one.ended is None]
        signs = sorted(self._signs(only_last=killed == [len(sessions) - 1])) if killed else []
        return [
            max(one.began, one.ended or (signs[before - 1] if (before := bisect_left(signs, until)) else 0.0))
            for one, until in zip(sessions, following, strict=False)
        ]

    def _signs(self, *, only_last: bool) -> Iterator[float]:
        """Yield the times of lines. With ``only_last``, read only the end of ``scalars.jsonl``, which may be long."""
        path = self.path / SCALARS
        scalars = _tail(path) if only_last else self.scalars()
        for lines in (self.record(), scalars):
            yield from (time for line in lines if isinstance(time := line.get("time"), int | float) and 0 <= time <= LATEST)

    def _lines(self, name: str, read: Callable[[bytes], T | None]) -> Iterator[T]:
        """Yield what ``read`` returns for the lines of a file. An incomplete last line is skipped without counting as damage.

        Raises:
            RunDamagedError: the file cannot be read.
        """
        self.damaged.pop(name, None)
        path = self.path / name
        if not os.path.lexists(path):
            return
        with _opened(path) as file:
            for number, line in enumerate(_split(file), 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    value = read(line)
                except (ValueError, RecursionError, msgspec.ValidationError):
                    self.damaged.setdefault(name, Damage(0, number)).lines += 1
                else:
                    if value is not None:
                        yield value


def is_run(path: Path) -> bool:
    """Return True for the folder of a run."""
    return any(os.path.lexists(path / name) for name in (MANIFEST, SCALARS, MEDIA))


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder and its subfolders, by name, and folders that cannot be read.

    Does not search within a run's folder.
    """
    found, waiting = [], [folder]
    while waiting:  # not recursive: folders may be nested more deeply than Python's calls
        path = waiting.pop()
        if is_run(path):
            found.append(path)
            continue
        try:
            below = sorted(one.name for one in os.scandir(path) if one.is_dir(follow_symlinks=False))
        except OSError:
            found.append(path)
        else:
            waiting += [path / name for name in reversed(below) if not name.startswith(".")]
    return found


def newest_run(runs: Iterable[Path]) -> Path | None:
    """Return the folder of the run whose files were written last; None without any."""
    return max(runs, key=_written, default=None)


def _written(run: Path) -> float:
    times = [0.0]
    for name in (MANIFEST, RECORD, SCALARS):
        with suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(times)


def bytes_in(folder: Path) -> int:
    """Return the size of the files in a folder, without files that a run removes meanwhile or that cannot be read."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        with suppress(OSError):
            for one in os.scandir(waiting.pop()):
                if one.is_dir(follow_symlinks=False):
                    waiting.append(one.path)
                elif one.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        total += one.stat(follow_symlinks=False).st_size
    return total


def read_manifest(folder: Path) -> RunManifest | None:
    """Return the content of ``run.json``; None if the file does not exist.

    Raises:
        RunDamagedError: the file is damaged, cannot be read, or is of a newer trainbus.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    way_out = "move it away: the next session writes a new one"
    with _opened(path) as file:
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise RunDamagedError(f"{path} is damaged (more than {_MOST:,} bytes); {way_out}")
    try:
        manifest = msgspec.json.decode(content, type=RunManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunDamagedError(f"{path} is damaged ({error}); {way_out}") from None
    if manifest.format > 1:
        raise RunDamagedError(f"{path} has format {manifest.format}, but this trainbus reads format 1; upgrade trainbus")
    if _is_deep(manifest.config):
        raise RunDamagedError(f"{path} is damaged (its config has more than {_DEEPEST} levels); {way_out}")
    return manifest


def write_manifest(folder: Path, manifest: RunManifest) -> None:
    """Replace ``run.json``, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(encodable(msgspec.to_builtins(manifest)))
    commit_bytes(folder / MANIFEST, msgspec.json.format(encoded, indent=2) + b"\n")


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """Return a line of ``record.jsonl``. Non-finite numbers become text; objects of other types become their repr."""
    return as_json(_finite(fields), repr, orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [one for one in level if isinstance(one, dict | list)]
    return bool(level)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file; raise RunDamagedError if it is not a regular one, or cannot be read."""
    try:
        if not S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise RunDamagedError(f"{path} is not a regular file; move it away")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise RunDamagedError(f"{path} cannot be read ({error.strerror})") from error


def _split(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, nothing but its end."""
    for line in iter(partial(file.readline, _MOST), b""):
        rest = line
        while len(rest) == _MOST and not rest.endswith(b"\n"):
            rest = file.readline(_MOST)
        yield line if rest is line else rest[-1:]


def _decoded(line: bytes) -> dict[str, Any]:
    """Return the object in a line; ValueError or RecursionError if it is damaged."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        value = json.loads(line)  # knows NaN and Infinity, which orjson does not
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004 - damage, as what is not JSON
    return value


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the last 64 KiB of a file of JSON lines."""
    if os.path.lexists(path):
        with _opened(path) as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            for line in file.read(1 << 16).splitlines():
                with suppress(ValueError, RecursionError):
                    yield _decoded(line)
