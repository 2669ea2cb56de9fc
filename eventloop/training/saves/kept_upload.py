"""Upload what an earlier run of a sharded model has kept in its work dirs, before a run resumes.

The ranks tell each other what they have of it, whatever their numbers are now. If it is all, and newer than what the stores
have, they upload it, and the run resumes from there. So the work dirs may be one, or each on a disk of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from operator import and_, or_
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from trainbus.eventloop.checkpoint import (
    AnyPath,
    RemotePath,
    as_path,
    check_regular,
    commit_bytes,
    is_plain_name,
    link,
    make_directory,
    outline,
    sharded_in,
    verify,
)
from trainbus.eventloop.checkpoint.shards import INDEX, SUFFIX, check_parts
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, TrainbusError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.saves.contents import SavedRun
from trainbus.eventloop.training.saves.discover import newest_candidate
from trainbus.eventloop.training.saves.kept import KeptParts, sweep_kept_shards
from trainbus.eventloop.training.saves.requests import SaveOutcome
from trainbus.eventloop.training.schema import KEPT, LAST, how_far
from trainbus.eventloop.user_errors import described

_TOLD: Final = 8
"""Paths that an error names at most."""

log = get_logger()


class _Place(NamedTuple):
    """Where a file of a kept save is. Of ranks that see it, the one with the smallest distance has the lead."""

    distance: int
    rank: int
    path: str


def upload_kept(run: SavedRun) -> dict[str, str]:
    """Upload the sharded save that work dirs keep for a store, if it is complete and the run's stores lack it.

    A collective. A run that saves to other stores than before uploads it there. What a store need not get any more is removed.

    Returns:
        Saves that are not complete, by the directory of their parts, each with what is missing.

    Raises:
        CheckpointError: a store does not answer, or none takes it and not all ranks see all of it.
    """
    return {} if run.work_dir is None else _Upload(run, run.work_dir).lost


class _Upload:
    def __init__(self, run: SavedRun, home: Path) -> None:
        self._run, self._home = run, home
        self._ranks = run.coordinator
        self._rank, self._size = self._ranks.rank, self._ranks.size
        self.lost: dict[str, str] = {}
        # The stores are those of rank 0, as in a save: work dirs of other names would have others.
        stores = [str(one) for one in run.saves.directories if isinstance(one, RemotePath)]
        self._stores, kept = self._merged((stores, dict(_records(home))), lambda one, other: (one[0], one[1] | other[1]))
        if kept:
            self._upload_newest(kept)

    def _urls(self, kept: KeptParts) -> list[RemotePath]:
        """Return the paths that a save waits for in stores of this run; if that has moved to others, those in each of them."""
        waits = [url for url in kept.urls if url.rpartition("/")[0] in self._stores]
        moved = [f"{store}/{url.rpartition('/')[2]}" for url in kept.urls[:1] for store in self._stores]
        return [url for url in map(as_path, waits or moved) if isinstance(url, RemotePath)]

    def _upload_newest(self, kept: dict[str, KeptParts]) -> None:
        seen = self._merged({(name, file): at for name, one in kept.items() for file, at in self._own(name, one)}, _nearest)
        places = {name: {file: at for (of, file), at in seen.items() if of == name} for name in kept}
        newest, needed = self._newest(places), set[str]()
        for name, one in sorted(kept.items(), key=lambda item: _far(item[1]), reverse=True):
            if needed - self.lost.keys() or _far(one) <= newest:
                continue  # a later one has all
            needed.add(name)
            if missing := self._missing(name, one, places[name]):
                self.lost[name] = f"{self._home / one.file}, kept for {', '.join(one.urls)}, lacks {missing}"
                self._log(log.warning, "a save that is kept for a store is not complete", names=one.urls, lacks=missing)
            elif self._upload(name, one, places[name]):
                needed.discard(name)
                newest = _far(one)
        sweep_kept_shards(self._home, needed)

    def _newest(self, places: Mapping[str, Mapping[str, _Place]]) -> tuple[int, ...]:
        """Return how far the newest save in the stores, and where else the run saves to, has come; () if there is none."""

        def find() -> tuple[int, ...]:
            try:
                path = newest_candidate(*(one for one in self._run.saves.directories if one != self._home))
            except CheckpointError as error:
                where = "; ".join(_told(of.values()) for of in places.values())
                raise CheckpointError(f"{error}. A save is kept for it: {where}") from error
            return () if path is None else how_far(outline(path))[:3]

        return self._ranks.from_first(find)

    def _own(self, name: str, kept: KeptParts) -> Iterator[tuple[str, _Place]]:
        """Yield the files of a kept save that this rank sees."""
        for number, file in enumerate([*kept.parts, INDEX, kept.file]):
            path = self._path(name, kept, file)
            with suppress(TrainbusError, OSError):
                check_regular(path)
                if file != kept.file or sharded_in(outline(path)) == name:
                    yield file, _Place((self._rank - number) % self._size, self._rank, str(path))

    def _path(self, name: str, kept: KeptParts, file: str) -> Path:
        return self._home / file if file == kept.file else self._home / name / file

    def _missing(self, name: str, kept: KeptParts, places: Mapping[str, _Place]) -> str:
        """Return what is missing or damaged, as text. Each rank verifies the files that it leads."""
        missing = {file: "" for file in (kept.file, INDEX, *kept.parts) if file not in places}
        if not missing:
            leads = {file: self._path(name, kept, file) for file, place in places.items() if place.rank == self._rank}
            found = {file: _problem(verify, path) for file, path in leads.items()}
            missing = {file: f" (rank {self._rank}: {problem})" for file, problem in found.items() if problem}
        missing = self._merged(missing, or_)
        told = ", ".join(f"{file}{problem}" for file, problem in [*missing.items()][:_TOLD])
        return told and f"{told}{' …' if len(missing) > _TOLD else ''}; there is {_told(places.values()) or 'nothing else'}"

    def _upload(self, name: str, kept: KeptParts, places: Mapping[str, _Place]) -> bool:
        """Upload a complete save to its stores; return False if none takes it, but each rank sees all of it."""
        start = time.perf_counter()
        problems = {url: self._give(name, kept, places, url) for url in self._urls(kept)}
        landed = [url for url, problem in problems.items() if not problem]
        for url in problems.keys() - landed:
            self._log(log.error, "a store did not take a save that is kept for it", name=str(url), error=problems[url])
        if landed:
            leads = places[kept.file].rank == self._rank
            self._together(lambda: self._point(landed) if leads else None)  # before any rank searches
            self._log(log.info, "uploaded a save that was kept for a store", names=[*map(str, landed)])
            SaveOutcome(self._run.bus, landed, kept.progress).committed(seconds=time.perf_counter() - start)
        elif not self._merged(all(self._path(name, kept, file).exists() for file in places), and_):
            told = "; ".join(problems.values()) or "this run saves to no store"
            raise CheckpointError(
                f"a save is kept for {', '.join(kept.urls)}, but cannot be uploaded: {told}. Not all ranks can read it: "
                f"{_told(places.values())}. Run again when the store takes it, or with another store as out_dir="
            )
        return bool(landed)

    def _give(self, name: str, kept: KeptParts, places: Mapping[str, _Place], url: RemotePath) -> str:
        """Have each rank upload the parts that it leads, and then one the file; return the problem of the first that failed."""
        leads, directory = [file for file, place in places.items() if place.rank == self._rank], url.with_name(name)

        def give_parts() -> None:
            for file in leads:
                if file != kept.file:
                    link(self._path(name, kept, file), directory / file, create=True)

        def give_file() -> None:
            if kept.file in leads:
                check_parts(directory, {INDEX, *kept.parts})
                link(self._home / kept.file, url, create=url.name not in url.parent.sizes())  # else it is an earlier run's

        made = self._together(lambda: None if self._rank else make_directory(directory))
        return made or self._together(give_parts) or self._together(give_file)

    def _point(self, landed: list[RemotePath]) -> None:
        """Have ``last_checkpoint`` in the stores and the work dir name the uploaded file."""
        pointers: dict[AnyPath, str] = {url.parent / LAST: url.name for url in landed}
        for pointer, text in {**pointers, self._home / LAST: str(landed[0])}.items():
            if problem := _problem(commit_bytes, pointer, text.encode()):
                log.warning("last_checkpoint does not name the newest save", path=str(pointer), error=problem)

    def _together(self, do: Callable[[], object]) -> str:
        """Call ``do`` on all ranks; return the problem of the first rank that has one."""
        problem = _problem(do)
        return str(self._merged(problem and f"rank {self._rank}: {problem}", lambda one, other: one or other))

    def _merged(self, value: Any, merge: Callable[[Any, Any], Any]) -> Any:
        return self._ranks.merged(value, merge)

    def _log(self, tell: Callable[..., object], event: str, **more: object) -> None:
        if not self._rank:
            tell(event, **more)


def _records(home: Path) -> Iterator[tuple[str, KeptParts]]:
    """Yield what a work dir has parts of, by the name of their directory."""
    for path in home.glob(f"*{SUFFIX}/{KEPT}"):
        try:
            check_regular(path)
            kept = msgspec.json.decode(path.read_bytes(), type=KeptParts)
            if stranger := [name for name in (kept.file, *kept.parts) if not is_plain_name(name)]:
                raise CheckpointDamagedError(f"{stranger[0]!r} is not a name of a file")
        except (TrainbusError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("what is kept for a store cannot be read", path=str(path), error=str(error))
        else:
            yield path.parent.name, kept


def _far(kept: KeptParts) -> tuple[int, ...]:
    return kept.progress.iter, kept.progress.epoch, kept.progress.validation


def _nearest(one: dict[tuple[str, str], _Place], other: dict[tuple[str, str], _Place]) -> dict[tuple[str, str], _Place]:
    return one | {file: min(one.get(file, place), place) for file, place in other.items()}


def _problem(do: Callable[..., object], *args: object) -> str:
    try:
        do(*args)
    except (TrainbusError, OSError) as error:
        return described(error)
    return ""


def _told(places: Collection[_Place]) -> str:
    told = [f"rank {place.rank} has {place.path}" for place in sorted(places, key=lambda place: place.rank)]
    return ", ".join(told[:_TOLD]) + (" …" if len(told) > _TOLD else "")
