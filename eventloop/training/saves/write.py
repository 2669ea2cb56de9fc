"""Write checkpoints on the background writer, and report each by an event."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.bus.subscription import OFFLOADED, Subscription
from trainbus.eventloop.checkpoint import (
    SCORES,
    AnyPath,
    BackgroundWriter,
    RemotePath,
    commit_bytes,
    file_kind,
    keep_as_old,
    link,
    make_directory,
    note_scores,
    write,
)
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.events import CheckpointStaged, RunView
from trainbus.eventloop.events.event import name_of
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload import Deadline
from trainbus.eventloop.training.saves.discover import peek
from trainbus.eventloop.training.saves.kept import KeptSaves, KeptShards, series
from trainbus.eventloop.training.saves.requests import SaveJob, SaveOutcome, SaveRequest
from trainbus.eventloop.training.schema import LAST
from trainbus.eventloop.user_errors import add_note

_STAGED: Final = name_of(CheckpointStaged)
_REST: Final = 3
"""A store that failed after n seconds is asked again after this times n: an outage takes a quarter of the writer's time."""

log = get_logger()


class CheckpointWriter:
    """Write jobs in order on a separate thread. A later job may replace one that has not begun.

    The work dir gets a pointer to the newest checkpoint in any directory. It also keeps what a store does not take.
    """

    def __init__(self, run: RunView, bus: Bus) -> None:
        self._view = run
        self._bus = bus
        self.made: dict[AnyPath, AnyPath] = {}
        """Directories that exist durably (a power cut cannot remove them), each with the path of its ``last_checkpoint``."""
        self._late: set[Subscription] = set()  # slow handlers of checkpoint_staged
        self._skipped = self._written = 0
        self._entered, self._retried = 0, -1  # jobs entered, and how many when the kept ones were tried again
        self._named: dict[AnyPath | None, tuple[int, AnyPath]] = {}  # for each pointer, the number and path that it names
        self.failed: set[AnyPath] = set()
        """Paths that could not be written."""
        self._unsaved: dict[AnyPath, Exception] = {}
        """Directories in stores that lack their last save of a sharded model, each with the reason."""
        self._kept = KeptSaves(run.work_dir, lambda path: any(hook.keeps(path) for hook in bus.hooks))
        self._kept_shards = KeptShards(run.work_dir, bus)
        self._there: dict[AnyPath, set[str]] = {}  # the names that this run may replace, by directory of a store
        self._rests: dict[AnyPath, float] = {}  # by directory of a store, the time until which it is not asked
        self._conflicts: dict[AnyPath, CheckpointError] = {}  # by directory to which another run saves
        self._writer = BackgroundWriter[SaveJob](self._write_checkpoint, at_exit=lambda: self.close(bus.abort_timeout))

    # --------------------------------------------------------------------------------------- on the training thread

    @property
    def busy(self) -> bool:
        """True while a file is being written, or waits for it."""
        return self._writer.busy and any(job.paths for job in self._writer.under_way)

    @property
    def newest(self) -> AnyPath | None:
        """The path of the newest durable checkpoint."""
        _, path = self._named.get(self._view.work_dir, (0, None))
        return path

    @property
    def kept_urls(self) -> list[str]:
        """The URLs that files in the work dir wait for."""
        return self._kept.urls

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until no job is under way, for at most ``seconds``."""
        self._writer.wait(seconds=seconds)

    def hand_over(self, job: SaveJob) -> None:
        """Publish ``checkpoint_staged`` and queue a job; drop it after an error, unless the thread has begun it."""
        try:
            self._view.publish(CheckpointStaged, path=str(job.paths[0]))
            self._entered += 1
            self._writer.enter(job, can_wait=job.staged is not None)
        except BaseException:
            if self._writer.waiting is job:
                self._writer.take_back()
            if not self._writer.has(job):
                job.release()
            raise

    def score(self, job: SaveJob, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of the validation of a state, once its file is written."""
        job.scores = metrics
        if not self._view.rank:
            self._writer.enter(SaveJob(job.request, [], job.progress, source=job), can_wait=False)

    def replace(self, path: AnyPath, agree: Callable[[bool], bool]) -> None:
        """Skip the waiting job, if any, in favour of ``path``; not if ``agree`` tells that another rank has begun it.

        Further names of it go with it. If it stays, they stay behind it: all ranks write in one order.
        """
        taken, agreed = self._writer.take_back(), False
        replaced = [job for job in taken if taken[0] in (job, job.source)]
        try:
            agreed = agree(bool(taken))
        finally:
            for job in taken:
                if not agreed or job not in replaced:
                    self._writer.enter(job, can_wait=job.staged is not None)
        for job in replaced if agreed else ():
            job.given_up = f"replaced by {path}"
            job.release()  # before the skip, so that its memory is free for the next save
            if job.paths:  # else only the scores of the one that was given up
                self.skip(job)

    def adopt(self, directories: Collection[AnyPath], resumed_from: AnyPath | None, done: int) -> None:
        """Adopt what is in ``directories``, and upload what an earlier run keeps for them. Call it before the first job.

        Files that are there now may be replaced. What appears later in a store with conditional writes is another run's.

        What is uploaded is the file that the run ``resumed_from``, and the best files of its first ``done`` iterations.
        """
        self._there = {one: set(one.sizes()) for one in directories if isinstance(one, RemotePath) and one.can_create}
        for path, urls in self._kept.files(directories):
            try:
                progress = peek(path)
            except (CheckpointError, OSError) as error:
                log.warning("a file that is kept for a store cannot be read", path=str(path), error=str(error))
                continue
            if progress.iter > done:
                log.warning("a file is kept for a store that has more progress than this run; it stays", path=str(path))
                continue
            number = 0 if path == resumed_from else -1
            job = SaveJob(SaveRequest(urls[0]), [*urls], progress, number=number, held=[path], kept=path, waiting=urls)
            self._kept.jobs.append(job)
            if number and (past := [url for url in urls if not series(url.name)]):
                self._give_up(job, past, "this run has resumed from a later one")
        self.retry()

    def retry(self) -> None:
        """Queue uploads of what is kept, if anything is, and there was another job since the last time."""
        if self._retried != self._entered:
            self._retried = self._entered
            self._enter_kept(self._kept.jobs)
            if self._kept_shards.job is not None:
                self._enter_kept([self._kept_shards.job])  # on all ranks

    def check_kept(self, *, raises: bool = True) -> None:
        """Log what stores have not taken by the end of the run.

        Raises:
            CheckpointError: ``raises``, and there is something that was requested with ``on_error="raise"``.
        """
        kept = "" if (path := self._kept_shards.path) is None else f'. It is kept as {path}, from which resume="auto" goes on'
        for directory, error in self._unsaved.items():
            log.error("a store lacks the last save of a sharded model", directory=str(directory), error=str(error))
        for error in self._unsaved.values() if raises else ():
            raise CheckpointError(f"the store lacks the last save of a sharded model: {error}{kept}") from error
        for job in self._kept.jobs:
            log.error("a store has not taken a save by the end of the run", names=[*map(str, job.waiting)], kept=str(job.kept))
        for job in self._kept.jobs if raises else ():
            if job.request.on_error == "log":
                continue
            raise CheckpointError(
                f"the store did not take {', '.join(map(str, job.waiting))} by the end of the run: {job.refusal}. The file is "
                f'kept as {job.kept}: once the store answers, run again with resume="auto", which uploads it'
            ) from job.refusal

    def close(self, seconds: float) -> None:
        """Write the queued jobs and end the thread; after ``seconds``, log the jobs that are left."""
        if not self._writer.closed and self._writer.here:
            self._enter_kept(self._kept.jobs)  # no sharded ones: the other ranks may not end now
        if self._writer.close(seconds):
            return
        left = self._writer.under_way
        for waiting in self._writer.take_back():
            waiting.release()
        log.warning("checkpoints were not written before the run ended", names=[str(job.paths[0]) for job in left if job.paths])

    def skip(self, job: SaveJob) -> None:
        """Log and publish the reason why a job is not written."""
        self._skipped += 1
        SaveOutcome(self._bus, job.paths, job.progress).skipped(job.given_up, skipped=self._skipped)

    # ------------------------------------------------------------------------------------------------ on the thread

    def _write_checkpoint(self, job: SaveJob) -> None:
        try:
            with self._bus.span("writing checkpoints"):
                self._write_job(job)
        except BaseException as error:  # noqa: BLE001 - raised on the training thread
            add_note(error, f"{OFFLOADED} writing of {(job.paths or (job.source or job).paths)[0]}")
            self._bus.fail(self, error)

    def _write_job(self, job: SaveJob) -> None:
        root = job.source or job
        if not job.paths:
            self._note_scores(root)
            return
        if root.given_up:
            self._skip_given_up(job, root)
            return
        if job.retry:
            job.paths = [path for path in job.paths if path in root.waiting]
        elif root.number < 0:
            self._written += 1
            root.number = self._written
        self._wait_for_handlers()
        if root.states is not None and root.staged is not None:
            take, root.states = root.states, None
            root.staged.put("ranks", take(lambda: self._writer.closed))
        start, size, done, failed = time.perf_counter(), 0, list[AnyPath](), dict[AnyPath, Exception]()
        # A failure at one path costs no other one. Local files come first: a store may not answer for a while.
        for path in sorted(job.paths, key=lambda path: isinstance(path, RemotePath)):
            try:
                size = max(size, self._write(job, path))
                done.append(path)
            except Exception as error:  # noqa: BLE001 - raised below
                failed[path] = error
        if failed and not done and _is_given_up(root):  # meanwhile
            self._skip_given_up(job, root)
            return
        seconds = time.perf_counter() - start
        kept = self._keep(root, failed)
        self.failed = (self.failed | failed.keys()) - set(done)
        root.lost = not (done or kept or root.held)
        if kept or root.lost or root.parts is not None or not any(isinstance(path, RemotePath) for path in job.paths):
            (root if kept else job).release()  # else further names in a store are written from it
        self._settle(root, done, kept)  # first, so that a hook knows which files it need not keep
        self._note_scores(root)
        self._report(job, done, failed, kept, size=size, seconds=seconds)

    def _note_scores(self, root: SaveJob) -> None:
        """Write the scores of a state beside its files, which stay without them if that fails."""
        for directory in dict.fromkeys(path.parent for path in root.held) if root.scores and root.digest else ():
            names = [path.name for path in root.held if path.parent == directory]
            try:
                if isinstance(directory, RemotePath):
                    self._check_store(directory / SCORES, can_wait=True)
                note_scores(directory, root.digest, names, root.scores)
            except CheckpointError as error:
                log.warning("the scores of a checkpoint are not recorded", path=str(directory / names[0]), error=str(error))

    def _skip_given_up(self, job: SaveJob, root: SaveJob) -> None:
        job.given_up, root.lost = root.given_up, True
        root.release()
        self.skip(job)

    def _report(
        self,
        job: SaveJob,
        done: list[AnyPath],
        failed: dict[AnyPath, Exception],
        kept: list[RemotePath],
        *,
        size: int,
        seconds: float,
    ) -> None:
        """Publish and log what became of a job; raise the first error of a path that is not kept, if the request says so."""
        raises = job.request.on_error == "raise"
        try:
            if done:
                written = 0 if job.source is not None else size
                SaveOutcome(self._bus, done, job.progress).committed(size=written, seconds=seconds, stall=job.stall)
        except Exception:
            log.exception("a handler of checkpoint_committed failed", path=str(done[0]))
            if raises:
                raise
        finally:
            gone = {path: error for path, error in failed.items() if path not in kept}
            if kept:
                root = job.source or job
                where = root.kept if root.parts is None else self._kept_shards.path
                SaveOutcome(self._bus, kept, job.progress).failed(failed[kept[0]], where)
            if gone:
                SaveOutcome(self._bus, [*gone], job.progress).failed(next(iter(gone.values())))
        for path in job.paths if (job.source or job).parts is not None else ():
            # A store that fails ends no run. If nothing keeps what it lacks of a sharded state, the next save must do.
            if path in done:
                self._unsaved.pop(path.parent, None)
            elif isinstance(path, RemotePath) and raises:
                gone.pop(path, None)
                self._unsaved[path.parent] = failed[path]
        if gone and raises:
            raise next(iter(gone.values()))

    def _keep(self, root: SaveJob, failed: dict[AnyPath, Exception]) -> list[RemotePath]:
        """Keep a state in the work dir for the stores that did not take it; return the paths that it waits for."""
        urls = [path for path in failed if isinstance(path, RemotePath)]
        home = self._view.work_dir
        if not urls or home is None:
            return []
        if root.parts is not None:
            return self._kept_shards.keep(root, urls, self._fill, self._landed)
        try:
            self._make(home)
            root.refusal = failed[urls[0]]
            self._landed(root, self._kept.keep(root, urls, lambda path: self._fill(root, path)))
        except (CheckpointError, OSError):
            log.exception("a checkpoint that a store did not take could not be kept", names=[*map(str, urls)])
            return []
        return urls

    def _settle(self, root: SaveJob, done: list[AnyPath], kept: list[RemotePath]) -> None:
        """After a job, forget the kept files that are uploaded or replaced, and upload the others to stores that answer."""
        if root.parts is not None and any(isinstance(path, RemotePath) for path in done):
            self._kept_shards.drop(done)
        if not self._kept.jobs:
            return
        self._kept.drop(root, done)
        for job, urls in self._kept.replaced([*done, *kept], by=root):
            self._kept.drop(job, [*done, *kept])  # the same names
            self._give_up(job, [url for url in urls if url in job.waiting], "a later save has been made")
        answering = {path.parent for path in done}
        self._enter_kept(
            [job for job in self._kept.jobs if job is not root and any(url.parent in answering for url in job.waiting)]
        )

    def _give_up(self, job: SaveJob, urls: list[RemotePath], reason: str) -> None:
        if urls:
            SaveOutcome(self._bus, urls, job.progress).skipped(reason)
            self._kept.drop(job, urls)

    def _enter_kept(self, jobs: Iterable[SaveJob]) -> None:
        for job in [*jobs]:
            paths: list[AnyPath] = [*job.waiting]
            self._writer.enter(SaveJob(job.request, paths, job.progress, source=job, retry=True), can_wait=False)

    def _wait_for_handlers(self) -> None:
        """Wait for the other offloaded handlers of ``checkpoint_staged``, up to half of the bus's ``abort_timeout``."""
        for one in self._bus.subscriptions:
            if one.lane is None or one.mode == "stream" or _STAGED not in one.mount_points:
                continue
            patience = 0.0 if one in self._late else self._bus.abort_timeout / 2  # an aborted run has all of it
            if one.lane.join(Deadline(patience)):
                self._late.discard(one)
            elif one not in self._late:
                self._late.add(one)
                log.warning("a checkpoint no longer waits for a slow handler of checkpoint_staged", handler=one.label)

    def _write(self, job: SaveJob, path: AnyPath) -> int:
        """Write a state, with this rank's part of a sharded one, or give its file a further name; return the bytes."""
        root = job.source or job

        def write_file() -> int:
            if isinstance(path, RemotePath):
                kept = root.parts is None and self._view.work_dir is not None
                self._check_store(path, can_wait=kept and not job.retry)
            start = time.monotonic()
            try:
                self._make(path.parent)
                if isinstance(path, Path):
                    _keep_foreign(path)
                size = self._fill(root, path)
                self._landed(root, path)
            except CheckpointError as error:
                if isinstance(error.__cause__, FileExistsError):
                    self._conflicts[path.parent] = error
                else:
                    self._replaceable(path)  # the store may have it nevertheless
                now = time.monotonic()
                self._rests[path.parent] = now + _REST * (now - start)
                raise
            self._replaceable(path)
            return size

        return write_file() if root.parts is None else root.parts.commit(path, write_file)

    def _fill(self, root: SaveJob, path: AnyPath) -> int:
        """Write the file ``path``, or link it to one that is there; return the bytes written."""
        create = path.name not in self._there.get(path.parent, (path.name,))
        local = next((one for one in root.held if isinstance(one, Path) and one.exists()), None)
        if root.staged is not None and not root.staged.released and (local is None or isinstance(path, RemotePath)):
            written = write(root.staged, path, release=False, create=create)
            root.digest = written.digest
            return written.bytes
        if local is None and not root.held:
            raise CheckpointError(f"cannot write {path}: the file that has its state could not be written")
        link(local or root.held[0], path, create=create)
        return 0

    def _check_store(self, path: RemotePath, *, can_wait: bool) -> None:
        """Raise if another run saves there, or the store has failed a moment ago and the file ``can_wait``."""
        if (conflict := self._conflicts.get(path.parent)) is not None:
            raise conflict
        if can_wait and (rest := self._rests.get(path.parent, 0.0) - time.monotonic()) > 0:
            raise CheckpointError(f"cannot write {path}: its store has failed, and is asked again in {rest:.0f} s")

    def _replaceable(self, path: AnyPath) -> None:
        if path.parent in self._there:
            self._there[path.parent].add(path.name)

    def _landed(self, root: SaveJob, path: AnyPath) -> None:
        """Note a durable file; have ``last_checkpoint`` in its directory and in the work dir name it, if it is the newest."""
        home = self._view.work_dir
        for directory in dict.fromkeys((path.parent, home)):
            number, named = self._named.get(directory, (-1, None))
            kept = root.kept or self._kept_shards.path  # which will be removed
            if root.number > number or (root.number == number and named == kept is not None):
                if directory is not None:
                    self._make(directory)
                    self._point(directory, path)
                self._named[directory] = root.number, path
        if path not in root.held:
            root.held.append(path)

    def _point(self, directory: AnyPath, path: AnyPath) -> None:
        """Have ``last_checkpoint`` in ``directory`` name a file."""
        pointer = self.made[directory]
        if isinstance(pointer, Path) and os.path.isdir(pointer) and not pointer.is_symlink():  # noqa: PTH112 - at each save
            log.warning("a directory had the name of last_checkpoint, and is kept", to=str(keep_as_old(pointer)))
        relative = path.name if path.parent == directory else str(path)
        if isinstance(path, Path) and path.parent != directory:
            relative = os.path.relpath(path, str(directory))
        try:
            commit_bytes(pointer, os.fsencode(relative))
        except CheckpointError as error:
            # A bucket in which nothing can be replaced. A resume finds the newest file without the pointer.
            if not (isinstance(directory, RemotePath) and isinstance(error.__cause__, PermissionError)):
                raise
            log.warning("the store refuses last_checkpoint", path=str(pointer), error=str(error))

    def _make(self, directory: AnyPath) -> None:
        # A local directory may have been removed; an object store has none to remove.
        if directory in self.made and (isinstance(directory, RemotePath) or os.path.isdir(directory)):  # noqa: PTH112
            return
        make_directory(directory)
        self.made[directory] = directory / LAST


def _is_given_up(job: SaveJob) -> bool:
    return bool(job.given_up)


def _keep_foreign(path: Path) -> None:
    """Keep what is not a checkpoint of trainbus, or cannot be read, under another name: a checkpoint is about to replace it."""
    if path.is_symlink() or not os.path.lexists(path):  # the file that a link leads to stays
        return
    try:
        if file_kind(path) == "checkpoint":
            return
        why = {}
    except OSError as error:  # a bad sector, no permission, a directory
        why = {"error": str(error)}
    log.warning(
        f"what had the name of a checkpoint {'cannot be read' if why else 'is of another program'}, and is kept",
        path=str(path),
        to=str(keep_as_old(path)),
        **why,
    )
