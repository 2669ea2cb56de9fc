"""Saves that a store did not take: each is kept as a file in the work dir until the store has it, or a later one.

``kept.json`` in the work dir lists the files, each with the URLs that it waits for, so that a resumed run uploads them. A file
is listed before it exists and until it is gone, so none stays behind unlisted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import (
    AnyPath,
    RemotePath,
    as_path,
    commit_bytes,
    is_plain_name,
    outline,
    remove,
    sharded_in,
    sweep_shards,
)
from trainbus.eventloop.checkpoint.shards import SUFFIX
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.events import Progress
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.saves.requests import SaveJob, SaveOutcome
from trainbus.eventloop.training.schema import KEPT

_SHARDED: Final = "kept_sharded_"
"""How the names of files of :class:`KeptShards` begin."""
_LAST_COUNT: Final = re.compile(r"\d+(?!.*\d)")

log = get_logger()


class KeptSaves:
    """The files in a work dir that wait for a store. Used by the writing thread, once the run has begun."""

    def __init__(self, work_dir: Path | None, wanted: Callable[[str], bool]) -> None:
        self._home = work_dir
        self._wanted = wanted
        self.jobs: list[SaveJob] = []
        """The saves in the files, oldest first."""
        self._listed: dict[str, list[str]] = self._read()

    @property
    def urls(self) -> list[str]:
        """The URLs that files wait for, those of other stores included."""
        return [url for urls in self._listed.values() for url in urls]

    def keep(self, job: SaveJob, urls: list[RemotePath], fill: Callable[[Path], object]) -> Path:
        """Have the kept file of ``job`` wait for ``urls``, too; return its path. If it has none, ``fill`` writes it.

        Raises:
            CheckpointError: it cannot be written.
        """
        path, first = job.kept or self._free_path(urls[0]), job.kept is None
        job.waiting += (new := [url for url in urls if url not in job.waiting])
        listed = self._listed.setdefault(path.name, [])
        listed += map(str, new)
        try:
            self._write()
            if first:
                fill(path)
        except BaseException:
            job.waiting = [url for url in job.waiting if url not in new]
            self._listed[path.name] = [url for url in listed if url not in map(str, new)]
            raise
        if first:
            job.kept = path
            self.jobs.append(job)
        return path

    def drop(self, job: SaveJob, urls: Iterable[AnyPath]) -> None:
        """Note that ``job`` waits for ``urls`` no longer; remove its file once it waits for none."""
        gone = {str(url) for url in urls}
        job.waiting = [url for url in job.waiting if str(url) not in gone]
        if (path := job.kept) is None:
            return
        left = [url for url in self._listed[path.name] if url not in gone]
        try:
            if not left:
                job.kept = None
                job.held = [one for one in job.held if one != path]
                self.jobs.remove(job)
                remove(path)
                log.info("removed a save that was kept for a store", path=str(path))
            self._listed[path.name] = left
            self._write()
        except (CheckpointError, OSError) as error:  # the next run in this work dir tries again
            log.warning("cannot remove a save that was kept for a store", path=str(path), error=str(error))

    def replaced(self, landed: Iterable[AnyPath], by: SaveJob) -> list[tuple[SaveJob, list[RemotePath]]]:
        """Return the saves earlier than ``by``, each with the URLs that it need not wait for, as ``by`` has ``landed`` there.

        A regular file is replaced by any later one in its directory, a best one by the next best one unless it is still wanted.
        """
        later = [(path.parent, series(path.name)) for path in landed]
        found = [
            (job, [url for url in job.waiting if self._is_replaced(url, later)]) for job in self.jobs if job.number < by.number
        ]
        return [(job, urls) for job, urls in found if urls]

    def _is_replaced(self, url: RemotePath, later: Iterable[tuple[AnyPath, str]]) -> bool:
        kind = series(url.name)
        return any(url.parent == place and kind in ("", best) for place, best in later) and not (
            kind and self._wanted(str(url))
        )

    def files(self, directories: Iterable[AnyPath]) -> list[tuple[Path, list[RemotePath]]]:
        """Return the listed files, each with the URLs in ``directories`` that it waits for. Forget files that are gone."""
        known, found = set(directories), list[tuple[Path, list[RemotePath]]]()
        for name, listed in [*self._listed.items()]:
            assert self._home is not None  # noqa: S101 - else nothing is listed
            path = self._home / name
            if not is_plain_name(name) or not path.is_file():
                del self._listed[name]
                continue
            urls = [url for url in map(as_path, listed) if isinstance(url, RemotePath) and url.parent in known]
            if len(urls) < len(listed):
                log.warning("a file is kept for a store that this run does not save to", path=str(path), urls=listed)
            if urls:
                found.append((path, urls))
        return found

    def _free_path(self, url: RemotePath) -> Path:
        assert self._home is not None  # noqa: S101 - asked by the only caller
        number, path = 1, self._home / f"kept_{url.name}"
        while path.name in self._listed or path.exists():
            number += 1
            path = self._home / f"kept_{url.stem}-{number}{url.suffix}"
        return path

    def _read(self) -> dict[str, list[str]]:
        if self._home is None:
            return {}
        try:
            return msgspec.json.decode((self._home / KEPT).read_bytes(), type=dict[str, list[str]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the list of files that wait for a store cannot be read", path=str(self._home / KEPT), error=str(error))
            return {}

    def _write(self) -> None:
        assert self._home is not None  # noqa: S101 - asked by the callers
        self._listed = {name: urls for name, urls in self._listed.items() if urls}
        if self._listed:
            commit_bytes(self._home / KEPT, msgspec.json.encode(self._listed))
        else:
            remove(self._home / KEPT)


class KeptParts(msgspec.Struct, frozen=True):
    """The record ``kept.json`` in a directory of parts: what they are parts of."""

    file: str
    """The name of the file that names the directory."""
    urls: list[str]
    """The paths in stores that it waits for."""
    progress: Progress
    """How far the run had come."""
    parts: list[str]
    """The files of all parts, wherever they are."""


class KeptShards:
    """The newest save of a sharded model in the work dirs, while no store has it. All ranks call the methods in one order."""

    def __init__(self, work_dir: Path | None, bus: Bus) -> None:
        self._home = work_dir
        self._bus = bus
        self._swept = False
        self.job: SaveJob | None = None
        """The save, which waits for a store;"""
        self.path: Path | None = None
        """its file, or this rank's part where the work dir does not have the file."""

    def keep(
        self,
        job: SaveJob,
        urls: list[RemotePath],
        fill: Callable[[SaveJob, AnyPath], int],
        landed: Callable[[SaveJob, AnyPath], object],
    ) -> list[RemotePath]:
        """Keep a save for ``urls``, if it is nowhere else; return those that it waits for. A collective.

        ``fill`` writes its file on rank 0, and ``landed`` is called then.
        """
        assert job.parts is not None  # noqa: S101 - asked by the only caller
        if self._home is None:
            return []
        if job.parts.written:
            return [url for url in urls if url in job.waiting] if job is self.job else []
        path = self._home / f"{_SHARDED}{urls[0].name}"
        directory = self._home / job.parts.name

        def note(parts: set[str]) -> None:
            record = KeptParts(path.name, [*map(str, urls)], job.progress, sorted(parts, key=lambda part: (len(part), part)))
            commit_bytes(directory / KEPT, msgspec.json.encode(record))

        def write_file() -> int:
            size = fill(job, path)
            landed(job, path)
            return size

        self._swept = False
        try:
            job.parts.commit(path, write_file, note)
        except CheckpointError as error:
            log.warning("a sharded save that a store did not take could not be kept", path=str(path), error=str(error))
            _remove_if_empty(directory)
            kept = []
        else:
            self._forget(urls)
            self.job, self.path, job.waiting, kept = job, path if path.exists() else directory, urls, urls
        self._sweep()
        return kept

    def drop(self, landed: Collection[AnyPath]) -> None:
        """Remove the save, and those of earlier runs: a store has it, or a later one. ``landed`` are the paths written."""
        self._forget(landed)
        if not self._swept:
            self._sweep()
            self._swept = True

    def _forget(self, landed: Collection[AnyPath]) -> None:
        job, path, self.job, self.path = self.job, self.path, None, None
        if job is None:
            return
        job.held = [one for one in job.held if one != path]
        if left := [url for url in job.waiting if url not in landed]:
            SaveOutcome(self._bus, [*left], job.progress).skipped("a later save has been made")

    def _sweep(self) -> None:
        if self._home is not None:
            parts = None if self.job is None else self.job.parts
            sweep_kept_shards(self._home, () if parts is None else (parts.name,))


def sweep_kept_shards(home: Path, needed: Collection[str]) -> None:
    """Remove kept sharded saves from a work dir, but for the directories ``needed``, and parts without a file.

    Ranks that see one work dir do so at the same time. None writes parts before all are done.
    """
    try:
        for path in home.glob(f"{_SHARDED}*.safetensors"):
            with suppress(FileNotFoundError):
                if (name := sharded_in(outline(path))) is not None and name not in needed:
                    remove(path)
                    log.info("removed a save that was kept for a store", path=str(path))
        for record in home.glob(f"*{SUFFIX}/{KEPT}"):
            if record.parent.name not in needed:
                record.unlink(missing_ok=True)  # from now on the directory is one without a file
                _remove_if_empty(record.parent)
        sweep_shards(home, still=0)
    except (CheckpointError, OSError) as error:
        log.warning("cannot remove a save that was kept for a store", path=str(home), error=str(error))


def _remove_if_empty(directory: Path) -> None:
    """Remove the directory of a rank that had no part to write, as of replicas."""
    with suppress(OSError):
        directory.rmdir()


def series(name: str) -> str:
    """Return the name of a best file without its count, as the next best one has it; empty for a regular file."""
    return _LAST_COUNT.sub("", name) if name.startswith("best_") else ""
