"""``Mirror``: have a store hold the checkpoints that a run keeps in a directory.

Saves are local first: the run writes files on this machine, and a mirror uploads them beside the training. What a store does
not take stays here and is tried again, at the next save, at the end of the run, and by the next run in this directory. So the
files themselves are the list of what waits. On this machine stay at most what waits and the newest.

A sharded model has its parts on the machines of its ranks. Each rank uploads what it has, and then one of them the file.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from trainbus.eventloop import CheckpointError, ConfigurationError, Hook, Priority, TrainbusError, events, get_logger, mount
from trainbus.eventloop.checkpoint import (
    COMMITTED,
    INDEX,
    SCORES,
    SHARDS_SUFFIX,
    AnyPath,
    FileScores,
    RemotePath,
    Together,
    awaiting_steps,
    check_parts,
    check_regular,
    commit_bytes,
    link,
    list_directories,
    list_files,
    make_directory,
    note_scores,
    outline,
    own_parts,
    part_files,
    read_scores,
    remove,
    remove_parts,
    remove_whole,
    sharded_in,
    sweep_shards,
    verify,
)
from trainbus.eventloop.events import Progress, RunView, Slot
from trainbus.eventloop.training import (
    LAST,
    SaveOutcome,
    how_far,
    is_candidate,
    newest_candidate,
    own_group,
    peek,
    read_pointer,
)
from trainbus.eventloop.user_errors import contextmanager, described
from trainbus.hooks.retention import SUFFIX, RetentionPolicy, sweep

log = get_logger()

_REST: Final = 3
"""A store that failed after n seconds is asked again after this times n: an outage takes a quarter of the mirror's time."""
_SHORT: Final = 1.0
"""A rest of fewer seconds is none."""
_ROOM: Final = 2
"""Files of the size of a save that need room: the next one is written while the newest waits for the store."""
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
        found = made[directory, str(store)] = Mirror(run, directory, store)
        run.checkpoints.mirrored_by(found)
    found.raises |= raises
    return found


class Mirror(Hook):
    """Upload the durable files of retention policies, and remove from the store what these drop. See :func:`mirror_of`.

    One thread uploads, one file after another.
    """

    priority = Priority.LOWEST  # behind the hooks that say which files stay

    def __init__(self, run: RunView, directory: Path | None, store: RemotePath) -> None:
        sharded = run.world_size > 1 and run.checkpoints.in_parts
        self.apart = sharded
        """True if each rank has a part of a file, perhaps on a machine of its own."""
        number = len(run.shared[MIRRORS])  # each has a thread and a group of its own
        self._all = Together(own_group(f"uploads {number}") if sharded else None)
        self.leads = self._all.first if sharded else run.rank == 0
        """True on the rank that says what is uploaded."""
        self.store = RemotePath(self._all.from_first(str(store)), store.fs)
        self.clears = directory is None
        """True to leave nothing here in the end: nobody would look for it."""
        if directory is None:
            directory = self._temporary()
        self.directory = directory
        """Where the files are on this machine."""
        self.raises = False
        self.policies: list[RetentionPolicy] = []
        """What says which files the store is to have."""
        self._run = run
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}  # durable here, oldest first
        self._number = 0
        self.replaced: list[str] = []
        """Files to remove from the store, once that has what replaces them."""
        self._numbers: dict[str, int] = {}  # those of the replaced ones
        self._newest_sent: dict[str, int] = {}  # by series, the number of the newest file that the store has
        self._parts_gone: list[str] = []  # directories with parts that are to be removed here, on all ranks
        self._earlier: set[str] = set()  # those that were there when the run began
        self._mine: set[str] = set()  # names that this run may replace in the store
        self._uploading = ""
        self._rests_until = 0.0
        self._conflict: CheckpointError | None = None
        self._pointed = -1  # the number of the file that last_checkpoint in the store names
        self._newest_there: tuple[int, ...] = ()  # how far the store's newest file had come when the run began
        self._scores: dict[str, FileScores] = {}  # as the store has them
        self._thread: int | None = None
        self._begun = self._has_sent = self._sweeps = False
        if (sharded or self.leads) and run.optimizers:
            if self.leads:
                self._mine = set(self.there) if self.store.can_create else set()  # what appears later is another run's
            run.bus.add(self)
            run.defer(lambda: run.bus.off(self))

    def _temporary(self) -> Path:
        """Make a directory that no other run has; of the same name on all machines, as saves have the paths of rank 0."""
        prefix = f"trainbus-{self.store.name or 'store'}-"
        made = tempfile.mkdtemp(prefix=prefix) if self.leads else f"{tempfile.gettempdir()}/{prefix}none"
        directory = Path(self._all.from_first(made))
        if self.apart:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    # ------------------------------------------------------------------------------------- what the run and hooks ask

    @cached_property
    def there(self) -> dict[str, int]:
        """The files that the store had when this run began, with their sizes in bytes."""
        return {one.name: 0 for one in self.store.directories()} | self.store.sizes()

    def has(self, name: str) -> bool:
        """Return True if a file is in the directory, or was in the store when the run began."""
        return (self.directory / name).exists() or name in self.there

    def path(self, name: str) -> AnyPath:
        """Return the path of a file where it can be read."""
        return here if (here := self.directory / name).exists() else self.store / name

    def keep(self, name: str, progress: Progress, size: int = 0) -> None:
        """A file of ``size`` bytes is durable in the directory."""
        shards = sharded_in(outline(self.directory / name)) if self.apart else None
        with self._lock:
            self._number += 1
            former = self._files.pop(name, None)
            self._files[name] = _File(self._number, progress, shards)
            if former is not None and former.shards is not None:
                self._parts_gone.append(former.shards)
                self._sweeps = True
        if size and shutil.disk_usage(self.directory).free < _ROOM * size:
            self._make_room(size)

    def waits_for(self, name: str) -> bool:
        """Return True if the store lacks a file of the policies."""
        with self._lock:
            return (file := self._files.get(name)) is None or not file.sent

    def _make_room(self, size: int) -> None:
        """Give up files that wait, the oldest first, but none of the best and not the newest."""
        if self._number == 1:
            free = shutil.disk_usage(self.directory).free
            log.warning(
                f"there is little room for checkpoints: {free / 1e9:.3g} GB are free, and each needs {size / 1e9:.3g} GB. They "
                "wait here while the store does not answer: CheckpointHook(local_dir=) names another place",
                id="little-room-for-checkpoints",
                directory=str(self.directory),
            )
        for name in self._waiting()[:-1]:
            if shutil.disk_usage(self.directory).free >= _ROOM * size:
                return
            if not any(policy.needs(name) for policy in self.policies):
                for policy in self.policies:
                    policy.give_up(name)
                self.drop(name, "the store does not take it, and there is no room for it here")

    def drop(self, name: str, reason: str = "a later save has been made") -> None:
        """No policy wants a file any more: remove it here, and in the store once that has what replaces it."""
        with self._lock:
            file = self._files.pop(name, None)
            self.replaced.append(name)
            self._numbers[name] = -1 if file is None else file.number
            mine = name != self._uploading  # else the other thread removes it when it is done
        if mine:
            self._remove_here(name, file)
            if file is not None and not file.sent:
                self._outcome(name, file.progress).skipped(reason)

    @mount(events.BeforeTrain, events.CheckpointCommitted, offload="thread", queue=8, on_error="log")
    def upload(self, event: events.BeforeTrain | events.CheckpointCommitted) -> None:
        """Upload what waits, and remove what is replaced."""
        self._thread = threading.get_ident()
        if not self._begun:
            self._all.do(f"cannot look at {self.store}", partial(self._begin, event.progress))
        self._pass()

    upload.has_own_group = True  # type: ignore[attr-defined]  # see eventloop/offload/collectives.py

    def wait(self) -> None:
        """Wait until the store has all files so far, or has refused them."""
        if self._thread != threading.get_ident():
            with awaiting_steps():
                for one in self._run.bus.subscriptions:
                    if one.hook is self:
                        one.join()

    def finish(self) -> CheckpointError | None:
        """Upload what is left, at the end of a run; return the error, if a hook with ``on_error="raise"`` lacks a file."""
        self.wait()
        if not self._begun:  # nothing was trained
            return None
        with awaiting_steps():
            self._pass(last=True)
        with self._lock:
            files = {name: file for name, file in self._files.items() if self.leads}
        files, raises = self._all.from_first((files, self.raises))
        left = [(name, file.error) for name, file in files.items() if not file.sent]
        self._all.do("", lambda: None)  # no rank leaves before the others know
        for name, error in left if self.leads else ():
            log.error(
                "a store lacks a save at the end of the run",
                id="store-lacks-save",
                name=str(self.store / name),
                kept=str(self.directory / name),
                error=error,
            )
        if self.clears and not left:
            self._clear(files)
        if not (left and raises):
            return None
        names = ", ".join(str(self.store / name) for name, _ in left)
        kept = ", ".join(str(self.directory / name) for name, _ in left)
        way = 'run again with resume="auto", which uploads it' if self._run.work_dir is not None else "copy it there"
        return CheckpointError(
            f"the store did not take {names} by the end of the run: {left[0][1]}. It is kept as {kept}: once the store "
            f"answers, {way}"
        )

    def tell_waiting(self) -> None:
        """Log what waits, when the run ends by an error."""
        if self.leads and (waiting := self._waiting()):
            names = [str(self.directory / name) for name in waiting]
            log.warning("files wait for a store", id="files-wait-for-store", names=names, store=str(self.store))

    def _clear(self, files: Mapping[str, _File]) -> None:
        for one in (*files, LAST, SCORES):
            with self._tells("cannot remove what a store has", one):
                remove_whole(self.directory / one)
        for shards in {file.shards for file in files.values()} - {None}:
            remove_parts(self.directory / str(shards))
        with suppress(OSError):
            self.directory.rmdir()  # unless it has other files

    # --------------------------------------------------------------------------------------- on the uploading thread

    def _begin(self, now: Progress) -> None:
        """Find out which files of an earlier run wait."""
        self._begun = True
        self._earlier = {one.name for one in list_directories(self.directory) if one.suffix == SHARDS_SUFFIX}
        if self.leads:
            self._keep_earlier(now)
            with self._tells("cannot look at a store", ""):
                make_directory(self.store)
                self._scores = read_scores(self.store)
                sweep(self.store)

    def _keep_earlier(self, now: Progress) -> None:
        found = dict[str, tuple[tuple[int, ...], float, Progress]]()
        for name in dict.fromkeys(name for policy in self.policies for name in policy.durable()):
            here = self.directory / name
            if name in self._files or not here.exists():
                if name in self.there:
                    self._newest_sent.setdefault(_series(name), 0)
                continue
            try:
                progress = peek(here) if here.suffix == SUFFIX else now  # of another trainer
                found[name] = _far(progress), here.stat().st_mtime, progress
            except (CheckpointError, OSError) as error:
                log.warning(
                    "a file that waits for a store cannot be read",
                    id="waiting-file-unreadable",
                    path=str(here),
                    error=str(error),
                )
        for name in sorted(found, key=lambda name: found[name][:2]):
            self.keep(name, found[name][2])
            file = self._files[name]
            file.earlier = True
            here = self.directory / name
            if name not in self.there or here.suffix != SUFFIX:
                continue
            if (self.store / name).same_as(here):
                self._sent(name, file)
            elif here != self._run.checkpoints.resumed_from:  # this training has saved it anew on another machine
                self._files.pop(name)
                self._remove_here(name, file)
        if self._waiting() and not self._newest_there:
            self._newest_there = (sys.maxsize,)  # an earlier file is not the newest there unless the store says so
            with self._tells("cannot look at a store", ""):
                self._newest_there = self._newest()

    def _waiting(self) -> list[str]:
        with self._lock:
            return [name for name, file in self._files.items() if not file.sent]

    def _due(self) -> list[str]:
        """Return what waits, the newest first, as this machine may vanish; before it, names that another run may have taken."""
        due = self._waiting()[::-1]
        if len(due) < 2 or not self.store.can_create:
            return due
        with suppress(CheckpointError):  # the upload will tell
            others = self.store.sizes().keys() - self._mine
            due.sort(key=lambda name: name not in others)
        return due

    def _pass(self, *, last: bool = False) -> None:
        """Try each file that waits, and remove what is replaced. All ranks that have parts do it together."""
        self._send_scores()
        for number, name in enumerate(self._all.from_first(self._due())):
            self._try(name, asks=last and not number)
        self._send_scores()
        if self.leads:
            self._remove_replaced()
        self._trim()

    def _try(self, name: str, *, asks: bool) -> None:
        """Upload a file, unless its store has failed a moment ago; ``asks`` the store in any case."""
        with self._lock:
            file = self._files.get(name)
            self._uploading = name if file is not None else ""
        rests = 0.0 if asks else max(0.0, self._rests_until - time.monotonic())
        file, rests = self._all.from_first((file, rests))
        if file is None or (rests > _SHORT and file.error):
            self._uploading = ""
            return
        start, outcome = time.monotonic(), self._outcome(name, file.progress)
        try:
            size = self._send(name, file, rests)
        except (CheckpointError, OSError) as error:
            if isinstance(error, CheckpointError) and isinstance(error.__cause__, FileExistsError):
                self._conflict = error
            gone = file.shards is None and not (self.directory / name).exists()  # somebody else has removed it
            if self._all.from_first(name in self._files):  # else it was dropped meanwhile
                told, self._files.get(name, file).error = bool(file.error), str(error)
                if rests <= _SHORT:
                    now = time.monotonic()
                    self._rests_until = now + _REST * (now - start)
                if not told:
                    kept = None if gone else self._kept(name, file)
                    self._publish(partial(outcome.failed, error, kept))
            if gone:
                with self._lock:
                    self._files.pop(name, None)
        else:
            self._has_sent = True
            self._sent(name, file)
            kept, seconds = self._kept(name, file), time.monotonic() - start
            self._publish(partial(outcome.uploaded, kept, size=size, seconds=seconds))
        finally:
            self._uploading = ""
            if self.leads and name not in self._files:  # dropped meanwhile
                self._remove_here(name, file)

    def _send(self, name: str, file: _File, rests: float) -> int:
        if rests > _SHORT:
            raise CheckpointError(
                f"cannot write {self.store / name}: its store has failed, and is asked again in {rests:.0f} s"
            )
        return self._send_file(name, file) if file.shards is None else self._send_shards(name, file.shards)

    def _sent(self, name: str, file: _File) -> None:
        with self._lock:
            self._newest_sent[_series(name)] = max(self._newest_sent.get(_series(name), -1), file.number)
            if (now := self._files.get(name)) is not None and now.number == file.number:  # else it was saved anew meanwhile
                now.sent, now.error = True, ""

    def _publish(self, publish: Callable[[], object]) -> None:
        """Tell an outcome. An error of a handler must not end a pass, which other ranks go on with."""
        try:
            publish()
        except Exception:
            log.exception("a handler of an upload's outcome failed", id="handler-of-upload-failed")

    def _kept(self, name: str, file: _File) -> Path:
        here = self.directory / name
        return here if file.shards is None or here.exists() else self.directory / file.shards

    def _send_file(self, name: str, file: _File) -> int:
        """Upload a file, and have ``last_checkpoint`` in the store name it, if it is the newest there."""
        if self._conflict is not None:
            raise self._conflict
        here, url = self.directory / name, self.store / name
        size = 0
        creates = self._creates(name)
        inner = sorted(one for one in here.rglob("*") if one.is_file()) if here.is_dir() else [here]
        for number, one in enumerate(inner):
            target = url if one is here else url / one.relative_to(here).as_posix()
            link(one, target, create=creates and not number)  # of a folder the first file tells whether it is another run's
            self._mine.add(name)
            size += one.stat().st_size
        self._mine.add(name)
        self._point(name, file)
        return size

    def _creates(self, name: str) -> bool:
        return self.store.can_create and name not in self._mine

    def _point(self, name: str, file: _File) -> None:
        if file.number <= self._pointed or (file.earlier and _far(file.progress) <= self._newest_there):
            return
        try:
            commit_bytes(self.store / LAST, name.encode())
        except CheckpointError as error:
            # A bucket in which nothing can be replaced. A resume finds the newest file without the pointer.
            if not isinstance(error.__cause__, PermissionError):
                raise
            log.warning(
                "the store refuses last_checkpoint",
                id="store-refuses-last-checkpoint",
                path=str(self.store / LAST),
                error=str(error),
            )
        self._pointed = file.number

    def _send_scores(self) -> None:
        """Bring the record of scores in the store up to date; files stay without them if that fails."""
        if not self.leads or self._rests_until > time.monotonic():
            return
        with suppress(OSError):
            for digest, one in read_scores(self.directory).items():
                names = [name for name in one.names if (file := self._files.get(name)) is not None and file.sent]
                known = self._scores.get(digest)
                if not names or (known is not None and {*names} <= {*known.names} and known.metrics == one.metrics):
                    continue
                try:
                    note_scores(self.store, digest, names, one.metrics)
                except CheckpointError as error:
                    log.warning(
                        "the scores of a checkpoint are not recorded",
                        id="store-scores-not-recorded",
                        path=str(self.store / names[0]),
                        error=str(error),
                    )
                    return
                self._scores[digest] = FileScores([*(known.names if known else ()), *names], one.metrics)

    def _remove_replaced(self) -> None:
        """Remove files from the store that are replaced, now that it has what replaces them."""
        all_sent = not self._waiting()
        with self._lock:
            gone = [name for name in self.replaced if name not in self._files]
            due = [name for name in gone if all_sent or self._newest_sent.get(_series(name), -1) > self._numbers.get(name, -1)]
            self.replaced = [name for name in gone if name not in due]
        for name in due:
            url = self.store / name
            try:
                if url.is_dir():
                    _remove_tree(url)
                remove(url)
                log.debug("removed an old checkpoint", path=str(url))
            except CheckpointError as error:
                log.warning("cannot remove an old checkpoint", id="stored-checkpoint-left", path=str(url), error=str(error))
                self.replaced.append(name)  # with the next one
        if self.apart and (due or self._sweeps):
            self._sweeps = False
            try:
                sweep_shards(self.store, still=0)  # nobody else uploads there
            except CheckpointError as error:
                log.warning(
                    "cannot remove parts of old checkpoints", id="stored-parts-left", path=str(self.store), error=str(error)
                )

    def _trim(self) -> None:
        """Remove the files here that the store has, but the newest, which ``last_checkpoint`` names."""
        if self.leads:
            with self._lock:
                sent = [(name, file) for name, file in self._files.items() if file.sent]
            newest = read_pointer(self.directory) if sent else ""
            for name, file in sent:
                if name != newest and (self.directory / name).exists():
                    self._remove_here(name, file)
        if self.apart:
            named = {_shards_in(one): one for one in _mains(self.directory)}
            with self._lock:
                gone, self._parts_gone = self._parts_gone, []
            gone, needed, replaces = self._all.from_first((gone, {*named}, self._has_sent))
            if replaces:  # what an earlier run has left here, too
                gone, self._earlier = [*gone, *self._earlier - needed], set()
            for one in gone:
                with self._tells("cannot remove parts of an old checkpoint", one):
                    if one in named and not self.leads:
                        remove(named[one])
                    remove_parts(self.directory / one)

    def _remove_here(self, name: str, file: _File | None) -> None:
        for one in self._policies_here():
            other = one.mirror
            if other is not self and one.has(name) and (other is None or other.waits_for(name)):
                return  # another hook keeps it on this machine, or its store lacks it
        with self._tells("cannot remove a checkpoint that a store has", name):
            remove_whole(self.directory / name)
        if file is not None and file.shards is not None:
            with self._lock:
                self._parts_gone.append(file.shards)

    def _policies_here(self) -> Iterator[RetentionPolicy]:
        for policy in self.policies[:1]:
            yield from (one for one in policy.of_hooks if one.directory == self.directory)

    @contextmanager
    def _tells(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            log.warning(what, id="local-files-left", path=str(self.directory / name), error=str(error))

    def _outcome(self, name: str, progress: Progress) -> SaveOutcome:
        return SaveOutcome(self._run.bus, [self.store / name], progress)

    # ------------------------------------------------------------------------------------------------ sharded models

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
            return self._send_file(name, self._files.get(name, _File(0, left.progress)))

        self._all.do(what, lambda: make_directory(url) if self.leads else None)
        size += self._all.do(what, send_parts)
        return size + self._all.do(what, send_file)

    def recover(self) -> dict[str, str]:
        """Upload the newest sharded save that an earlier run has left, so that all ranks can read it. A collective.

        Returns:
            Saves that are not whole, by the directory of their parts, each with what is missing.

        Raises:
            CheckpointError: a store does not answer, or it does not take a save of which not all ranks see all.
        """
        if not self.apart:
            return {}
        own = [one.name for one in list_directories(self.directory) if own_parts(one)]
        names = sorted({name for names in self._all.share(own) for name in names})
        if not names:
            return {}
        lefts = {name: self._look(name) for name in names}
        newest = self._all.from_first(self._all.do("cannot look at the store", lambda: self._newest_of(lefts)))
        lost = dict[str, str]()
        for name, left in sorted(lefts.items(), key=lambda one: one[1].far, reverse=True):
            if not left.file and COMMITTED not in left.places:  # its writing was interrupted
                continue
            replaced = bool(left.file) and left.far <= newest
            there = self.leads and (self._is_whole_there(name) or (replaced and left.file in self.there))
            if self._all.from_first(there):
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

    def _newest(self) -> tuple[int, ...]:
        """Return how far the newest save in the store has come; () if there is none."""
        path = newest_candidate(self.store)
        return () if path is None else how_far(outline(path))[:3]

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


class _File(msgspec.Struct):
    """A file that is durable on this machine."""

    number: int
    """The position among the files of this run."""
    progress: Any
    shards: str | None = None
    """The directory of its parts."""
    sent: bool = False
    """True once the store has it."""
    error: str = ""
    """Why the store did not take it; empty if it has, or was not asked yet."""
    earlier: bool = False
    """True if an earlier run has saved it."""


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
        return () if self.progress is None else _far(self.progress)

    @property
    def files(self) -> list[str]:
        """All files of it, the one that names the others last."""
        return [
            *(self.parts or [one for one in self.places if one.startswith("__")]),
            INDEX,
            self.file or "the file that names it",
        ]


def _far(at: Progress) -> tuple[int, ...]:
    return at.iter, at.epoch, at.validation


def _mains(directory: Path) -> list[AnyPath]:
    return [path for path, _ in list_files(directory) if is_candidate(path)]


def _shards_in(main: AnyPath) -> str | None:
    try:
        return sharded_in(outline(main))
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


def _remove_tree(url: RemotePath) -> None:
    files = [file for one in [url, *list_directories(url)] for file, _ in list_files(one)]
    url.remove_directory(files)


def _series(name: str) -> str:
    """Return the name of a file without its counts: files of one series replace one another."""
    return re.sub(r"\d+", "", name)
