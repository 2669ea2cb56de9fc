"""Read the files of a run's work dir: ``run.json``, ``record.jsonl`` and ``scalars.jsonl``, also of a killed run.

``run.json`` describes the run and each session in which it trained. ``record.jsonl`` has one line per event, such as
``{"time": 1764000000.5, "kind": "checkpoint", "epoch": 3, "iter": 400, ...}``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import orjson

from eventloop.checkpoint import commit_bytes
from eventloop.errors import TrainbusError
from eventloop.observe.environment import Environment

FACTS: Final = "run.json"
"""Name of the file that describes a run."""
RECORD: Final = "record.jsonl"
"""Name of the file with the events of a run, one JSON object a line."""
SCALARS: Final = "scalars.jsonl"
"""Name of the file with the scalars, one JSON object a line."""

State = Literal["running", "finished", "stopped", "interrupted", "failed", "killed", "unknown"]


class Session(msgspec.Struct, kw_only=True):
    """One process of a run, from ``before_run`` to its end. Times are seconds since 1970."""

    began: float
    environment: Environment
    world_size: int = 1
    stages: list[str] = []
    resumed_from: str = ""
    ended: float | None = None
    state: Literal["running", "finished", "stopped", "interrupted", "failed"] = "running"
    reason: str = ""
    """The error, or the reason given to ``run.stop()``."""
    epoch: int = 0
    iter: int = 0

    @property
    def state_now(self) -> State:
        """The state; ``killed`` if the process no longer runs, ``unknown`` if it is on another machine."""
        if self.state != "running":
            return self.state
        lives = self.environment.process.lives()
        return "unknown" if lives is None else "running" if lives else "killed"


class RunFacts(msgspec.Struct, kw_only=True):
    """The content of ``run.json``."""

    format: int = 1
    name: str
    seed: int | None = None
    config: dict[str, Any] = {}
    sessions: list[Session] = []


class RunFolderError(TrainbusError):
    """A folder is not the folder of a run."""


class RunDamagedError(RunFolderError):
    """The ``run.json`` of a run cannot be read."""


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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: dict[str, Damage] = {}
        if not is_run(path):
            raise RunFolderError(f"{path}: not the folder of a run: it has neither {FACTS} nor {SCALARS}")

    def facts(self) -> RunFacts:
        """Return the content of ``run.json``; without the file, only the name of the run."""
        return read_facts(self.path) or RunFacts(name=self.path.name)

    def record(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``record.jsonl``."""
        return self._lines(RECORD)

    def scalars(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``scalars.jsonl``. The later one of two lines with the same step counts."""
        return self._lines(SCALARS)

    def ends(self) -> list[float]:
        """Return the end of each session, in seconds since 1970. A killed session ends with its last line in a file."""
        sessions = self.facts().sessions
        following = [*(one.began for one in sessions), math.inf][1:]
        killed = [index for index, one in enumerate(sessions) if one.ended is None]
        signs = sorted(self._signs(only_last=killed == [len(sessions) - 1])) if killed else []
        return [
            one.ended or max(one.began, signs[before - 1] if (before := bisect_left(signs, until)) else 0.0)
            for one, until in zip(sessions, following, strict=False)
        ]

    def seconds(self) -> float:
        """Return the time of all sessions together."""
        return sum(end - one.began for one, end in zip(self.facts().sessions, self.ends(), strict=True))

    def _signs(self, *, only_last: bool) -> Iterator[float]:
        """Yield the times of lines. With ``only_last``, read only the end of ``scalars.jsonl``, which may be long."""
        path = self.path / SCALARS
        scalars = _tail(path) if only_last else self.scalars()
        for lines in (self.record(), scalars):
            yield from (line["time"] for line in lines if isinstance(line.get("time"), int | float))

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects in a file of JSON lines. An incomplete last line is skipped without counting as damage."""
        self.damaged.pop(name, None)
        path = self.path / name
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                value = _decoded(line)
                if value is not None:
                    yield value
                else:
                    self.damaged.setdefault(name, Damage(0, number)).lines += 1


def is_run(path: Path) -> bool:
    """Return True for the folder of a run."""
    return (path / FACTS).is_file() or (path / SCALARS).is_file()


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder and its subfolders, by name. Does not search within a run's folder."""
    if is_run(folder):
        return [folder]
    below = sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink() and not one.name.startswith("."))
    return [run for one in below for run in find_runs(one)]


def read_facts(folder: Path) -> RunFacts | None:
    """Return the content of ``run.json``; None if the file does not exist.

    Raises:
        RunDamagedError: the file is damaged, or of a newer trainbus.
    """
    path = folder / FACTS
    if not path.is_file():
        return None
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=RunFacts)
    except msgspec.DecodeError as error:
        raise RunDamagedError(f"{path} is damaged ({error}); move it away: the next session writes a new one") from None
    if facts.format > 1:
        raise RunDamagedError(f"{path} has format {facts.format}, but this trainbus reads format 1; upgrade trainbus")
    return facts


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Replace ``run.json``, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    commit_bytes(folder / FACTS, msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """Return a line of ``record.jsonl``. Non-finite numbers become text; objects of other types become their repr."""
    return orjson.dumps(_finite(fields), default=repr, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it is damaged."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(line)  # knows NaN and Infinity, which orjson does not
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the last 64 KiB of a file of JSON lines."""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            decoded = map(_decoded, file.read().splitlines())
            yield from (one for one in decoded if one is not None)
