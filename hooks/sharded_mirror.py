"""``mirror_of``, and ``ShardedMirror``: where each rank has a part of a file, perhaps on a machine of its own.

Each rank uploads the parts that it has, and then one of them the file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from trainbus.eventloop import CheckpointError, ConfigurationError, TrainbusError, get_logger
from trainbus.eventloop.checkpoint import (
    COMMITTED,
    INDEX,
    SHARDS_SUFFIX,
    AnyPath,
    RemotePath,
    Together,
    check_parts,
    check_regular,
    link,
    list_directories,
    list_files,
    make_directory,
    own_parts,
    part_files,
    plain_tree,
    remove,
    remove_parts,
    sharded_in,
    sweep_shards,
    verify,
)
from trainbus.eventloop.events import Progress, RunView, Slot
from trainbus.eventloop.training import is_candidate, own_group, peek
from trainbus.eventloop.user_errors import described
from trainbus.hooks.mirror import File, Mirror, T, far
from trainbus.hooks.retention import SUFFIX

log = get_logger()

_TOLD: Final = 8
"""Paths that an error names at most."""
_NUMBER: Final = re.compile(r"__(\d+)\.")

MIRRORS = Slot("mirrors", dict)
"""The mirrors of a run, by directory and URL: hooks that save to the same share one."""


def mirror_of(run: RunView, directory: Path | None, store: RemotePath, *, raises: bool) -> Mirror:
    """Return the mirror of a directory for a run that has not begun to train. All ranks call it.

    Args:
        run: the run.
        directory: where the files are on this machine; None for a temporary one.
        store: where they go.
        raises: True to fail the run if the store lacks a file in the end.

    Raises:
        ConfigurationError: another hook has them wait elsewhere.
    """
    made = run.shared[MIRRORS] = run.shared.get(MIRRORS, {})
    found: Mirror | None = made.get((directory, str(store)))
    if found is None and any(url == str(store) for _, url in made):
        raise ConfigurationError(f"hooks save to {store} with several local_dir=: give all of them the same")
    if found is None:
        sharded = run.world_size > 1 and run.checkpoints.in_parts
        found = made[directory, str(store)] = (ShardedMirror if sharded else Mirror)(run, directory, store)
        run.checkpoints.mirrored_by(found)
    found.raises |= raises
    return found


class ShardedMirror(Mirror):
    """The mirror of files whose parts all ranks have. They do each step together; rank 0 says what is uploaded."""

    apart: ClassVar[bool] = True

    def __init__(self, run: RunView, directory: Path | None, store: RemotePath) -> None:
        self._all = Together(own_group(f"uploads {len(run.shared[MIRRORS])}"))  # each has a thread and a group of its own
        self._parts_gone: list[str] = []  # directories with parts that are to be removed here, on all ranks
        self._earlier: set[str] = set()  # those that were there when the run began
        self._sweeps = False
        super().__init__(run, directory, RemotePath(self._all.from_first(str(store)), store.fs))

    def _temporary(self) -> Path:
        directory = Path(self._agreed(str(super()._temporary())))  # saves have the paths of rank 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    # --------------------------------------------------------------------------------------------- each step, together

    def _agreed(self, own: T) -> T:
        return self._all.from_first(own)

    def _shards_of(self, name: str) -> str | None:
        return sharded_in(plain_tree(self.directory / name))

    def _saved_anew(self, former: File) -> None:
        if former.shards is not None:
            self._parts_gone.append(former.shards)
            self._sweeps = True

    def finish(self) -> CheckpointError | None:
        error = super().finish()
        if self._begun:
            self._all.do("", lambda: None)  # no rank leaves before the others know
        return error

    def _clear(self, files: Mapping[str, File]) -> None:
        for shards in {file.shards for file in files.values()} - {None}:
            remove_parts(self.directory / str(shards))
        super()._clear(files)

    def _begin(self, now: Progress) -> None:
        def begin() -> None:
            self._earlier = {one.name for one in list_directories(self.directory) if one.suffix == SHARDS_SUFFIX}
            if self.leads:
                Mirror._begin(self, now)

        self._all.do(f"cannot look at {self.store}", begin)

    def _send_file(self, name: str, file: File) -> int:
        return super()._send_file(name, file) if file.shards is None else self._send_shards(name, file.shards)

    def _kept(self, name: str, file: File) -> Path:
        here = super()._kept(name, file)
        return here if file.shards is None or here.exists() else self.directory / file.shards

    def _remove_replaced(self) -> list[str]:
        due = super()._remove_replaced()
        if due or self._sweeps:
            self._sweeps = False
            try:
                sweep_shards(self.store, still=0)  # nobody else uploads there
            except CheckpointError as error:
                log.warning(
                    "cannot remove parts of old checkpoints", id="stored-parts-left", path=str(self.store), error=str(error)
                )
        return due

    def _trim(self) -> None:
        if self.leads:
            super()._trim()
        named = {_shards_in(one): one for one in _mains(self.directory)}
        with self._lock:
            gone, self._parts_gone = self._parts_gone, []
        gone, needed, replaces = self._agreed((gone, {*named}, self._has_sent))
        if replaces:  # what an earlier run has left here, too
            gone, self._earlier = [*gone, *self._earlier - needed], set()
        for one in gone:
            with self._tells("cannot remove parts of an old checkpoint", one):
                if one in named and not self.leads:
                    remove(named[one])
                remove_parts(self.directory / one)

    def _remove_here(self, name: str, file: File | None) -> bool:
        if gone := super()._remove_here(name, file):
            with self._lock:
                self._parts_gone += [file.shards] if file is not None and file.shards is not None else []
        return gone

    # -------------------------------------------------------------------------------------------------- parts of ranks

    def _look(self, shards: str) -> _Left:
        """Return what the ranks have of a sharded save. A collective."""
        directory, own = self.directory / shards, _Left()
        for file, _ in list_files(directory):
            if file in own_parts(directory):
                own.places[file.name] = self._place(file)
        with suppress(TrainbusError, OSError):
            own.parts = sorted(part_files(directory))
        for main in _mains(self.directory):
            if _shards_in(main) == shards:
                with suppress(TrainbusError, OSError):
                    own.file, own.progress = main.name, peek(main)
                    own.places[main.name] = self._place(main)
        found = _Left()
        for one in self._all.share(own):
            found = found.merged(one)
        return found

    def _place(self, file: AnyPath) -> _Place:
        number = int(found[1]) if (found := _NUMBER.match(file.name)) else 0
        return _Place((self._all.rank - number) % self._all.size, self._all.rank, str(file))

    def _send_shards(self, name: str, shards: str) -> int:
        """Have each rank upload the parts that it leads, and then one the file; return the bytes of this rank. A collective."""
        left, what = self._look(shards), f"cannot upload {self.store / name}"
        if lacks := [file for file in left.files if file not in left.places]:
            raise CheckpointError(f"{what}: it lacks {', '.join(lacks[:_TOLD])}; there is {_told(left)}")
        mine = [file for file in left.files if left.places[file].rank == self._all.rank]
        url, size = self.store / shards, 0

        def send_parts() -> int:
            for file in mine:
                if file != left.file:
                    link(self.directory / shards / file, url / file, create=self._creates(name))
            return sum((self.directory / shards / file).stat().st_size for file in mine if file != left.file)

        def send_file() -> int:
            if left.file not in mine:
                return 0
            check_parts(url, {*left.files[:-1]})
            return Mirror._send_file(self, name, self._files.get(name, File(0, left.progress)))

        self._all.do(what, lambda: make_directory(url) if self.leads else None)
        size += self._all.do(what, send_parts)
        return size + self._all.do(what, send_file)

    def recover(self) -> dict[str, str]:
        own = [one.name for one in list_directories(self.directory) if own_parts(one)]
        names = sorted({name for names in self._all.share(own) for name in names})
        if not names:
            return {}
        lefts = {name: self._look(name) for name in names}
        newest = self._agreed(self._all.do("cannot look at the store", lambda: self._newest_of(lefts)))
        lost = dict[str, str]()
        for name, left in sorted(lefts.items(), key=lambda one: one[1].far, reverse=True):
            if not left.file and COMMITTED not in left.places:  # its writing was interrupted
                continue
            replaced = bool(left.file) and left.far <= newest
            there = self.leads and (self._is_whole_there(name) or (replaced and left.file in self.there))
            if self._agreed(there):
                self._forget_copy(left, name)
                continue
            if replaced:  # it may be a best one that the store lacks
                continue
            if missing := self._missing(name, left):
                lost[name] = f"{self.directory / name}, which waits for {self.store}, lacks {missing}"
                self._tell(
                    log.warning,
                    "a save that waits for a store is not complete",
                    id="waiting-save-incomplete",
                    name=name,
                    lacks=missing,
                )
            elif newest := self._recovered(name, left):
                self.there[left.file] = 0
                self._forget_copy(left, name)
            else:
                break  # all ranks can read it here
        self._newest_there = newest
        return lost

    def _is_whole_there(self, name: str) -> bool:
        """Return True if the store has the file that names a directory of parts, which was uploaded last."""
        main = f"{name.rpartition('-')[0]}{SUFFIX}"
        return main in self.there and _shards_in(self.store / main) == name

    def _newest_of(self, lefts: dict[str, _Left]) -> tuple[int, ...]:
        try:
            return self._newest() if self.leads else ()
        except CheckpointError as error:
            where = "; ".join(map(_told, lefts.values()))
            raise CheckpointError(f"{error}. A save waits for it: {where}") from error

    def _missing(self, name: str, left: _Left) -> str:
        """Return what is missing or damaged, as text. Each rank verifies the files that it leads."""
        missing = {file: "" for file in left.files if file not in left.places}
        if not missing:
            leads = [file for file in left.files if left.places[file].rank == self._all.rank]
            found = {file: _problem(Path(left.places[file].path)) for file in leads}
            missing = {file: f" (rank {self._all.rank}: {problem})" for file, problem in found.items() if problem}
        everyones = dict[str, str]()
        for one in self._all.share(missing):
            everyones |= one
        told = ", ".join(f"{file}{problem}" for file, problem in [*everyones.items()][:_TOLD])
        return told and f"{told}{' …' if len(everyones) > _TOLD else ''}; there is {_told(left) or 'nothing else'}"

    def _recovered(self, name: str, left: _Left) -> tuple[int, ...]:
        """Upload a whole save; return how far it has come, or () if the store refuses it, but each rank sees all of it."""
        start, outcome = time.monotonic(), self._outcome(left.file, left.progress)
        try:
            size = self._send_shards(left.file, name)
        except CheckpointError as error:
            if not self._all_see(left, name):
                raise CheckpointError(
                    f"{error}. Not all ranks can read it: {_told(left)}. Run again when the store takes it, or with another "
                    "store as out_dir="
                ) from error
            self._tell(
                log.error,
                "a store did not take a save that waits for it",
                id="waiting-save-not-uploaded",
                name=str(self.store / left.file),
                error=str(error),
            )
            return ()
        self._tell(log.info, "uploaded a save that waited for a store", name=str(self.store / left.file))
        outcome.uploaded(self.directory / left.file, size=size, seconds=time.monotonic() - start)
        return left.far

    def _forget_copy(self, left: _Left, name: str) -> None:
        """Where not all ranks see a save that the store has, remove it: the run is to resume from the store."""
        if not self._all_see(left, name):
            with self._tells("cannot remove a checkpoint that a store has", left.file):
                if left.file:
                    remove(self.directory / left.file)
                remove_parts(self.directory / name)

    def _all_see(self, left: _Left, name: str) -> bool:
        here = [self.directory / (file if file == left.file else f"{name}/{file}") for file in left.files]
        return all(self._all.share(all(map(Path.exists, here))))

    def _tell(self, tell: Any, event: str, **more: object) -> None:
        if self.leads:
            tell(event, **more)


class _Place(NamedTuple):
    """Where a file of a sharded save is. Of ranks that see it, the one with the smallest distance has the lead."""

    distance: int
    rank: int
    path: str


class _Left(msgspec.Struct):
    """What the ranks have of a sharded save."""

    file: str = ""
    """The file that names the directory; empty if no rank has it."""
    progress: Any = None
    parts: list[str] | None = None
    """The files of all parts; None if no rank has the index."""
    places: dict[str, _Place] = {}

    def merged(self, other: _Left) -> _Left:
        places = self.places | {file: min(at, self.places.get(file, at)) for file, at in other.places.items()}
        return _Left(self.file or other.file, self.progress or other.progress, self.parts or other.parts, places)

    @property
    def far(self) -> tuple[int, ...]:
        return () if self.progress is None else far(self.progress)

    @property
    def files(self) -> list[str]:
        """All files of it, the one that names the others last."""
        return [
            *(self.parts or [one for one in self.places if one.startswith("__")]),
            INDEX,
            self.file or "the file that names it",
        ]


def _mains(directory: Path) -> list[AnyPath]:
    return [path for path, _ in list_files(directory) if is_candidate(path)]


def _shards_in(main: AnyPath) -> str | None:
    try:
        return sharded_in(plain_tree(main))
    except (TrainbusError, OSError):  # damaged, or removed meanwhile
        return None


def _problem(path: Path) -> str:
    try:
        check_regular(path)
        verify(path)
    except (TrainbusError, OSError) as error:
        return described(error)
    return ""


def _told(left: _Left) -> str:
    told = [f"rank {place.rank} has {place.path}" for place in sorted(left.places.values(), key=lambda place: place.rank)]
    return ", ".join(told[:_TOLD]) + (" …" if len(told) > _TOLD else "")
