"""``Mirror``: have a store hold the checkpoints that a run keeps in a directory.

Saves are local first: the run writes files on this machine, and a mirror uploads them beside the training. What a store does
not take stays here and is tried again, at the next save, at the end of the run, and by the next run in this directory. So the
files themselves are the list of what waits. On this machine stay at most what waits and the newest.

Rank 0 does so alone. If ranks have parts of each file, see ``sharded_mirror.py``.
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
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from trainbus.eventloop import CheckpointError, Hook, Priority, events, get_logger, mount
from trainbus.eventloop.checkpoint import (
    SCORES,
    AnyPath,
    FileScores,
    RemotePath,
    awaiting_steps,
    commit_bytes,
    link,
    list_directories,
    list_files,
    make_directory,
    note_scores,
    plain_tree,
    read_scores,
    remove,
    remove_whole,
)
from trainbus.eventloop.events import Progress, RunView
from trainbus.eventloop.training import LAST, SaveOutcome, how_far, newest_candidate, peek, read_pointer
from trainbus.eventloop.user_errors import contextmanager
from trainbus.hooks.retention import SUFFIX, RetentionPolicy, sweep

T = TypeVar("T")

log = get_logger()

_REST: Final = 3
"""A store that failed after n seconds is asked again after this times n: an outage takes a quarter of the mirror's time."""
_SHORT: Final = 1.0
"""A rest of fewer seconds is none."""
_ROOM: Final = 2
"""Files of the size of a save that need room: the next one is written while the newest waits for the store."""


class Mirror(Hook):
    """Upload the durable files of retention policies, and remove from the store what these drop.

    One thread uploads, one file after another. ``mirror_of`` in ``sharded_mirror.py`` makes it.
    """

    priority = Priority.LOWEST  # behind the hooks that say which files stay

    apart: ClassVar[bool] = False
    """True if each rank has a part of a file, perhaps on a machine of its own."""

    def __init__(self, run: RunView, directory: Path | None, store: RemotePath) -> None:
        self.leads = run.rank == 0
        """True on the rank that says what is uploaded."""
        self.store = store
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
        self._files: dict[str, File] = {}  # durable here, oldest first
        self._number = 0
        self.replaced: list[str] = []
        """Files to remove from the store, once that has what replaces them."""
        self._numbers: dict[str, int] = {}  # those of the replaced ones
        self._stored: dict[str, int] = {}  # the numbers, below 0, of files that only the store had when the run began
        self._newest_sent: dict[str, int] = {}  # by series, the number of the newest file that the store has
        self._mine: set[str] = set()  # names that this run may replace in the store
        self._uploading = ""
        self._rests_until = 0.0
        self._conflict: CheckpointError | None = None
        self._pointed = -1  # the number of the file that last_checkpoint in the store names
        self._newest_there: tuple[int, ...] = ()  # how far the store's newest file had come when the run began
        self._scores: dict[str, FileScores] = {}  # as the store has them
        self._thread: int | None = None
        self._begun = self._has_sent = False
        if (self.apart or self.leads) and run.optimizers:
            if self.leads:
                self._mine = set(self.there) if self.store.can_create else set()  # what appears later is another run's
            run.bus.add(self)
            run.defer(lambda: run.bus.off(self))

    def _temporary(self) -> Path:
        """Return a directory that no other run has."""
        prefix = f"trainbus-{self.store.name or 'store'}-"
        return Path(tempfile.mkdtemp(prefix=prefix) if self.leads else f"{tempfile.gettempdir()}/{prefix}none")

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
        shards = self._shards_of(name)
        with self._lock:
            self._number += 1
            former = self._files.pop(name, None)
            self._files[name] = File(self._number, progress, shards)
            if former is not None:
                self._saved_anew(former)
        if size and shutil.disk_usage(self.directory).free < _ROOM * size:
            self._make_room(size)

    def _shards_of(self, name: str) -> str | None:
        """Return the directory of the parts of a file."""
        return None

    def _saved_anew(self, former: File) -> None:
        """A file has another one of its name in its place; called with the lock."""

    def recover(self) -> dict[str, str]:
        """Upload the newest save that an earlier run has left, if not all ranks can read it. A collective.

        Returns:
            Saves that are not whole, by the directory of their parts, each with what is missing.

        Raises:
            CheckpointError: a store does not answer, or it does not take a save of which not all ranks see all.
        """
        return {}

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
            self._numbers[name] = self._stored.get(name, -sys.maxsize) if file is None else file.number
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
            self._begun = True
            self._begin(event.progress)
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
            files = {**self._files}
        files, raises = self._agreed((files, self.raises))
        left = [(name, file.error) for name, file in files.items() if not file.sent]
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

    def _agreed(self, own: T) -> T:
        """Return what the rank that leads has."""
        return own

    def _clear(self, files: Mapping[str, File]) -> None:
        for one in (*files, LAST, SCORES):
            with self._tells("cannot remove what a store has", one):
                remove_whole(self.directory / one)
        with suppress(OSError):
            self.directory.rmdir()  # unless it has other files

    # --------------------------------------------------------------------------------------- on the uploading thread

    def _begin(self, now: Progress) -> None:
        """Find out which files of an earlier run wait."""
        self._keep_earlier(now)
        with self._tells("cannot look at a store", ""):
            make_directory(self.store)
            self._scores = read_scores(self.store)
            sweep(self.store)

    def _keep_earlier(self, now: Progress) -> None:
        found, stored = dict[str, tuple[tuple[int, ...], float, Progress]](), list[str]()
        for name in dict.fromkeys(name for policy in self.policies for name in policy.durable()):
            here = self.directory / name
            if name in self._files or not here.exists():
                if name in self.there:
                    stored.append(name)
                continue
            try:
                progress = peek(here) if here.suffix == SUFFIX else now  # of another trainer
                found[name] = far(progress), here.stat().st_mtime, progress
            except (CheckpointError, OSError) as error:
                log.warning(
                    "a file that waits for a store cannot be read",
                    id="waiting-file-unreadable",
                    path=str(here),
                    error=str(error),
                )
        for number, name in enumerate(sorted(stored, key=_counts), -len(stored)):
            self._stored[name] = number
            self._newest_sent[_series(name)] = max(self._newest_sent.get(_series(name), number), number)
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

    def _newest(self) -> tuple[int, ...]:
        """Return how far the newest save in the store has come; () if there is none."""
        path = newest_candidate(self.store)
        return () if path is None else how_far(plain_tree(path))[:3]

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
        """Try each file that waits, and remove what is replaced. All ranks that take part do it together."""
        self._send_scores()
        for number, name in enumerate(self._agreed(self._due())):
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
        file, rests = self._agreed((file, rests))
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
            if self._agreed(name in self._files):  # else it was dropped meanwhile
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

    def _send(self, name: str, file: File, rests: float) -> int:
        if rests > _SHORT:
            raise CheckpointError(
                f"cannot write {self.store / name}: its store has failed, and is asked again in {rests:.0f} s"
            )
        return self._send_file(name, file)

    def _sent(self, name: str, file: File) -> None:
        with self._lock:
            self._newest_sent[_series(name)] = max(self._sent_number(name), file.number)
            if (now := self._files.get(name)) is not None and now.number == file.number:  # else it was saved anew meanwhile
                now.sent, now.error = True, ""

    def _sent_number(self, name: str) -> int:
        """Return the number of the newest file of the series that the store has, below that of any file if it has none."""
        return self._newest_sent.get(_series(name), -sys.maxsize)

    def _publish(self, publish: Callable[[], object]) -> None:
        """Tell an outcome. An error of a handler must not end a pass, which other ranks go on with."""
        try:
            publish()
        except Exception:
            log.exception("a handler of an upload's outcome failed", id="handler-of-upload-failed")

    def _kept(self, name: str, file: File) -> Path:
        return self.directory / name

    def _send_file(self, name: str, file: File) -> int:
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

    def _point(self, name: str, file: File) -> None:
        if file.number <= self._pointed or (file.earlier and far(file.progress) <= self._newest_there):
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

    def _remove_replaced(self) -> list[str]:
        """Remove files from the store that are replaced, now that it has what replaces them; return their names."""
        all_sent = not self._waiting()
        with self._lock:
            gone = [name for name in self.replaced if name not in self._files]
            due = [name for name in gone if all_sent or self._sent_number(name) > self._numbers.get(name, -sys.maxsize)]
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
        return due

    def _trim(self) -> None:
        """Remove the files here that the store has, but the newest, which ``last_checkpoint`` names."""
        with self._lock:
            sent = [(name, file) for name, file in self._files.items() if file.sent]
        newest = read_pointer(self.directory) if sent else ""
        for name, file in sent:
            if name != newest and (self.directory / name).exists():
                self._remove_here(name, file)

    def _remove_here(self, name: str, file: File | None) -> bool:
        """Remove a file here; return False if another hook keeps it."""
        for one in self._policies_here():
            other = one.mirror
            if other is not self and one.has(name) and (other is None or other.waits_for(name)):
                return False  # on this machine, or its store lacks it
        with self._tells("cannot remove a checkpoint that a store has", name):
            remove_whole(self.directory / name)
        return True

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


class File(msgspec.Struct):
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


def far(at: Progress) -> tuple[int, ...]:
    """Return what tells which of two saves is the newer one."""
    return at.iter, at.epoch, at.validation


def _remove_tree(url: RemotePath) -> None:
    files = [file for one in [url, *list_directories(url)] for file, _ in list_files(one)]
    url.remove_directory(files)


def _counts(name: str) -> list[int]:
    """Return the counts in the name of a file: the higher, the newer."""
    return [int(count) for count in re.findall(r"\d+", name)]


def _series(name: str) -> str:
    """Return the name of a file without its counts: files of one series replace one another."""
    return re.sub(r"\d+", "", name)
