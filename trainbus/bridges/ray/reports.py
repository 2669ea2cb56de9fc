"""``RayReports``: all calls of Ray that wait for other workers, on one thread of each worker, in the order of rank 0.

Rank 0 decides what comes next, puts the order into the store of the process group, and carries it out; the other ranks look for
it there. So no rank waits in a collective that another one does not enter, and the training threads never wait for any of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from trainbus.bridges.ray.folders import CopiedFolders, LinkedFolders, RayFolders
from trainbus.bridges.ray.worker import RayWorker
from trainbus.eventloop.checkpoint import AnyPath, RemotePath, commit_bytes, open_file
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.eventloop.user_errors import described

_LOOK: Final = 0.2
"""Seconds between two looks of a rank for its next order."""
_NOTICE: Final = 1.0
"""Seconds between two questions whether Ray will take machines away. Ray itself looks each 5 s."""
_KNOWN: Final = 10.0
"""Seconds for Ray to take what was reported, and to tell which checkpoints it knows."""
_MOST: Final = 8
"""Saves that wait for Ray: it takes a report each 2 s."""
_TOLD: Final = "told_to_ray.json"
"""In Ray's storage path: what it was told last, by iterations, for what it forgets."""
_REMEMBERED: Final = 50
_MARGIN: Final = 5.0
"""Seconds before machines are taken away at which the last save is asked for."""

log = get_logger()

_numbers = count()  # of the runs in this process, which all ranks make in one order


class _Order(msgspec.Struct):
    kind: Literal["report", "notice", "end"]
    folder: str = ""


class _Save(msgspec.Struct):
    """A save that Ray is to be told of."""

    path: str
    done: int = -1
    """Iterations in it; -1 until it is durable."""
    metrics: dict[str, Any] | None = None
    """What Ray is told with it; None until the training has gone on from it, as a validation may follow."""


class _Told(msgspec.Struct):
    path: str
    metrics: dict[str, Any]


class RayReports:
    """Tell Ray the newest metrics and each durable checkpoint, and hear of machines that it will take away.

    All methods but :meth:`end` return at once, on any thread.

    Args:
        worker: this worker.
        every: seconds between reports of metrics without a checkpoint.
        noticed: called on rank 0's thread with Ray's ``PreemptionInfo`` when a save is wanted: at the notice, and shortly
            before the machines go.
        pruned: called there with a file that the run needs no more, as Ray keeps it or has deleted its checkpoint.
    """

    def __init__(
        self, worker: RayWorker, *, every: float, noticed: Callable[[Any], object], pruned: Callable[[AnyPath], object]
    ) -> None:
        self._worker, self._every, self._noticed, self._pruned = worker, every, noticed, pruned
        self._folders: RayFolders | None = None  # on rank 0
        if not worker.rank:
            self._folders = LinkedFolders(place) if isinstance(place := worker.folder, Path) else CopiedFolders(place)
        self._mail = Mailbox(f"ray/{next(_numbers)}") if worker.size > 1 else None
        self._lock = threading.Condition()
        self._metrics: dict[str, Any] = {}
        self._validated: set[str] = set()  # their names that come from a validation
        self._stale: set[str] = set()  # those of a validation of earlier weights
        self._saves: list[_Save] = []
        self._changed = self._ending = False
        self.aborted = False
        """True once nothing more is told."""
        self.uncopied: set[str] = set()
        """Names of files that Ray's folders are still to be copied from."""
        self._thread: threading.Thread | None = None
        self._made: dict[int, AnyPath | None] = {}  # by iterations, the folders that Ray is not told of yet
        # Used by the thread only.
        self._next_metrics = self._next_notice = 0.0
        self._of_order: dict[str, Any] | None = None  # the metrics of the save that an order is about
        self._info: Any = None
        self._save_again_at = math.inf
        self._newest = -1  # iterations in the newest save that Ray was told of
        self._told: dict[int, _Told] = {}  # by iterations

    def start(self, directory: AnyPath, resumed_at: int) -> None:
        """Begin, in a run with this work dir that goes on from a number of iterations (0 for a new run)."""
        work = (lambda: self._lead(directory, resumed_at)) if not self._worker.rank else self._follow
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="trainbus tells Ray", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------------- what happens

    def measured(self, metrics: Mapping[str, Any], *, validated: bool = False) -> None:
        """Take new metrics: plain numbers. They count for later saves, and for earlier ones until :meth:`moved`.

        Those of a validation (``validated``) count for no save after :meth:`moved`: Ray would rank it by other weights.
        """
        with self._lock:
            self._metrics.update(metrics)
            if validated:
                self._validated.update(metrics)
            self._stale.difference_update(metrics)
            self._changed = True

    def staged(self, path: str) -> None:
        """A state was copied, which will be written to ``path``."""
        if not self._worker.rank:
            with self._lock:
                self._saves.append(_Save(path))

    def moved(self) -> None:
        """The training has gone on: metrics that come now belong to a later state than that of the saves so far."""
        with self._lock:
            for save in self._saves:
                if save.metrics is None:
                    save.metrics = {name: value for name, value in self._metrics.items() if name not in self._stale}
            self._stale.update(self._validated)
            self._lock.notify()

    def keep(self, path: str, done: int) -> None:
        """Make the folder of a durable state with ``done`` iterations at once, before the retention of the run removes it."""
        if self._worker.rank or done in self._made or done <= self._newest:  # of another rank, or another name of the file
            return
        folder = None
        if self._folders is not None:
            try:
                folder = self._folders.place(self._worker.at(path))
            except (CheckpointError, OSError) as error:
                log.warning(
                    "Ray is not told of a checkpoint; resume='auto' finds it",
                    id="ray-checkpoint-refused",
                    path=path,
                    error=str(error),
                )
        if isinstance(folder, RemotePath):
            self.uncopied.add(path.rpartition("/")[2])
        self._made[done] = folder

    def committed(self, paths: Sequence[str], done: int) -> None:
        """A state with ``done`` iterations is durable under these names."""
        with self._lock:
            save = next((one for one in self._saves if one.path in paths), None)
            if save is None and not self._worker.rank:  # another trainer names its files late
                self._saves.append(save := _Save(paths[0]))
            if save is None:
                return
            save.done = done
            twice = any(one.done == done and one is not save for one in self._saves)
            if twice or done <= self._newest:  # another name of the same file
                self._saves.remove(save)
            self._lock.notify()

    def dropped(self, paths: Iterable[str]) -> None:
        """A state was not written."""
        with self._lock:
            self._saves = [one for one in self._saves if one.path not in paths]

    def abort(self) -> None:
        """Tell Ray nothing more: the run has failed, and Ray is about to start it again."""
        self.aborted = True

    def end(self, seconds: float) -> None:
        """Tell Ray what is left, for at most ``seconds``."""
        self.moved()
        with self._lock:
            self._ending = True
            self._lock.notify()
        if self._thread is None:
            return
        deadline = time.monotonic() + (2 * _LOOK if self.aborted else seconds)
        while self._thread.is_alive() and time.monotonic() < deadline and not (self._failed and not self.aborted):
            self._thread.join(_LOOK)
        if self._thread.is_alive() and not self.aborted:
            log.warning(
                "Ray has not taken the last report in time; the saves are in the work dir, and resume='auto' finds them",
                id="ray-report-late",
                seconds=seconds,
                saves=[one.path for one in self._saves],
            )
            self.aborted = True

    # ------------------------------------------------------------------------------------------------- on the thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - Ray, or the store of ranks that have ended
            if not self.aborted:
                log.warning(
                    "Ray took no report, and gets no more from this start. Training goes on, its saves are in the work dir, "
                    "and resume='auto' finds them; Ray's Result lacks them. Is ray.train.report() called elsewhere, too?",
                    id="ray-reports-ended",
                    error=described(error),
                )
            if self._mail is not None:
                with suppress(Exception):  # the store may be gone
                    self._mail.put("failed")

    def _lead(self, directory: AnyPath, resumed_at: int) -> None:
        self._adopt(directory, resumed_at)
        self._next_metrics = time.monotonic() + self._every
        for number in count():
            while (order := self._next_order()) is None:
                with self._lock:
                    self._lock.wait(_LOOK)
            if self._mail is not None:
                self._mail.put(str(number), order)
            if order.kind == "end":
                break
            self._carry_out(order)
            if self._mail is not None and number:
                self._mail.remove([str(number - 1)])  # all ranks are past it
            self._prune()
        if not self._failed:
            self._worker.reported(_KNOWN)  # when Ray has taken the last report, and deleted what this replaces
            self._prune()

    @property
    def _failed(self) -> bool:
        """True if nothing more can be told, because one of the ranks does not call Ray any more."""
        try:
            return self.aborted or (self._mail is not None and self._mail.has("failed"))
        except (RuntimeError, OSError):  # the process with the store has ended
            return True

    def _next_order(self) -> _Order | None:
        now = time.monotonic()
        if self._failed:
            return _Order("end")
        if (save := self._ready()) is not None:
            return self._of_save(save)
        if self._changed and (self._ending or now >= self._next_metrics):
            return _Order("report")
        if self._ending:
            return _Order("end")
        if now >= self._next_notice:
            self._next_notice = now + _NOTICE
            return _Order("notice")
        return None

    def _prune(self) -> None:
        for file in () if self._folders is None else self._folders.pruned():
            self._pruned(file)

    def _follow(self) -> None:
        assert self._mail is not None  # noqa: S101 - there are several ranks
        for number in count():
            while not self._mail.has(str(number)):
                if self._failed:
                    return
                time.sleep(_LOOK)
            (order,) = self._mail.get(_Order, str(number))
            if order.kind == "end":
                return
            self._carry_out(order)

    def _carry_out(self, order: _Order) -> None:
        if order.kind == "notice":
            self._hear(self._worker.notice())
            return
        with self._lock:
            metrics, self._of_order = self._of_order, None
            if metrics is None:
                metrics, self._changed = dict(self._metrics), False
        self._worker.report(metrics, order.folder)
        self._next_metrics = time.monotonic() + self._every

    def _hear(self, info: Any) -> None:
        """Ask for a save when Ray is about to take machines away, and once more shortly before."""
        if self._worker.rank or info is None:
            return
        if info != self._info:
            self._info, self._save_again_at = info, (info.deadline_ms or math.inf) / 1000 - _MARGIN
            self._noticed(info)
        elif time.time() >= self._save_again_at:
            self._save_again_at = math.inf
            self._noticed(info)

    def _ready(self) -> _Save | None:
        """Take the oldest save that Ray can be told of; None if there is none."""
        with self._lock:
            ready = sorted((one for one in self._saves if one.done >= 0 and one.metrics is not None), key=lambda one: one.done)
            late, ready = ready[:-_MOST], ready[-_MOST:]
            for one in (*late, *ready[:1]):
                self._saves.remove(one)
        for one in late:
            log.warning(
                "Ray takes a report each 2 s; it is not told of a checkpoint that waits", id="ray-report-waits", path=one.path
            )
            if self._folders is not None and (folder := self._made.pop(one.done, None)) is not None:
                self._folders.discard(folder)
            self.uncopied.discard(one.path.rpartition("/")[2])
            if self._worker.keeps is not None:  # Ray will not remove it
                self._pruned(self._worker.at(one.path))
        return ready[0] if ready else None

    def _of_save(self, save: _Save) -> _Order | None:
        """Return the order to tell Ray of a save; None if there is nothing to tell."""
        self._newest = max(self._newest, save.done)
        folder = self._made.pop(save.done, None)
        if self._folders is None or folder is None:
            return None
        file = self._worker.at(save.path)
        try:
            self._folders.fill(folder, file)
        except (CheckpointError, OSError) as error:
            log.warning(
                "Ray is not told of a checkpoint; resume='auto' finds it",
                id="ray-checkpoint-not-told",
                path=save.path,
                error=str(error),
            )
            return None
        finally:
            self.uncopied.discard(file.name)
        self._folders.told(folder, file)
        self._changed = self._changed and save.metrics != self._metrics
        self._of_order = {**(save.metrics or {}), "iter": save.done}
        self._remember(save.done, _Told(save.path, self._of_order))
        return _Order("report", folder.name)

    def _remember(self, done: int, told: _Told) -> None:
        self._told = dict([*self._told.items(), (done, told)][-_REMEMBERED:])
        try:
            commit_bytes(self._worker.folder / _TOLD, msgspec.json.encode(self._told))
        except CheckpointError as error:
            log.warning("the metrics of a checkpoint are not kept for Ray", id="ray-metrics-not-kept", error=str(error))

    def _recall(self) -> dict[int, _Told]:
        try:
            with open_file(self._worker.folder / _TOLD) as (file, _):
                return msgspec.json.decode(file.read(), type=dict[int, _Told])
        except FileNotFoundError:
            return {}
        except (CheckpointError, OSError, msgspec.DecodeError) as error:
            log.warning(
                "the metrics of checkpoints that Ray has forgotten cannot be read",
                id="ray-metrics-unreadable",
                error=str(error),
            )
            return {}

    def _adopt(self, directory: AnyPath, resumed_at: int) -> None:
        """Tell Ray again what it has forgotten, and the run what Ray has deleted while no worker ran."""
        if self._folders is None:
            return
        known, prunes = self._worker.reported(_KNOWN), self._worker.keeps is not None
        forgotten, deleted = self._folders.adopt(known, directory, resumed_at, prunes=prunes)
        for file in deleted:
            self._pruned(file)
        self._told = self._recall()
        last, found = max(known.values(), default=-1), {done: str(path) for path, done in forgotten}
        # Files of other trainers have no progress that could be read.
        others = {done: told.path for done, told in self._told.items() if last < done <= resumed_at}
        found |= {done: path for done, path in others.items() if done not in found and self._worker.at(path).exists()}
        if found:
            log.info("Ray has forgotten checkpoints, and is told again", names=[*found.values()])
        for done, path in sorted(found.items()):
            self.keep(path, done)
            # Metrics of the resumed one may come: a run that resumes from a save before a validation begins with it.
            told = self._told.get(done)
            metrics = told.metrics if told is not None else (None if done == resumed_at else {})
            with self._lock:
                self._saves.append(_Save(path, done, metrics))
