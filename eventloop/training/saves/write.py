"""Write checkpoints on the background writer, and report each by an event."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from eventloop.bus import Bus
from eventloop.bus.subscription import OFFLOADED, Subscription
from eventloop.checkpoint import (
    AnyPath,
    BackgroundWriter,
    RemotePath,
    StagedTree,
    commit_bytes,
    file_kind,
    free_name,
    link,
    make_directory,
    write,
)
from eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointStaged, Progress, RunView
from eventloop.events.event import name_of
from eventloop.log import get_logger
from eventloop.offload import Deadline
from eventloop.training.saves.requests import SaveRequest, publish_skipped
from eventloop.training.schema import LAST

if TYPE_CHECKING:  # a second to import, and only sharded models need it
    from eventloop.checkpoint.sharded import Parts

_STAGED: Final = name_of(CheckpointStaged)

log = get_logger()


class SaveJob(msgspec.Struct, eq=False):
    """One save: a staged state, or an earlier job whose file already holds it, and the names of its file."""

    request: SaveRequest
    paths: list[AnyPath]
    progress: Progress
    version: tuple[int, ...] = ()
    """Version of the state."""
    staged: StagedTree | None = None
    stall: float = 0.0
    """Seconds that the training thread spent on it."""
    source: SaveJob | None = None
    given_up: str = ""
    """The reason why it is not written; empty otherwise."""
    parts: Parts | None = None
    """This process's part of a sharded state."""

    def release(self) -> None:
        """Release the memory of the staged state."""
        if self.staged is not None:
            self.staged.release()


class CheckpointWriter:
    """Write jobs in order on a separate thread. A later job may replace one that has not begun.

    The work dir gets a pointer to the newest checkpoint in any directory.
    """

    def __init__(self, run: RunView, bus: Bus) -> None:
        self._view = run
        self._bus = bus
        self.made: dict[AnyPath, AnyPath] = {}
        """Directories that exist durably (a power cut cannot remove them), each with the path of its ``last_checkpoint``."""
        self._late: set[Subscription] = set()  # slow handlers of checkpoint_staged
        self._skipped = 0
        self.newest: AnyPath | None = None
        """The path of the newest durable checkpoint."""
        self.failed: set[AnyPath] = set()
        """Paths that could not be written."""
        self._writer = BackgroundWriter[SaveJob](self._write_checkpoint, at_exit=lambda: self.close(bus.abort_timeout))

    # --------------------------------------------------------------------------------------- on the training thread

    @property
    def busy(self) -> bool:
        """True while a job is under way."""
        return self._writer.busy

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until no job is under way, for at most ``seconds``."""
        self._writer.wait(seconds=seconds)

    def hand_over(self, job: SaveJob) -> None:
        """Publish ``checkpoint_staged`` and queue a job; drop it after an error, unless the thread has begun it."""
        try:
            self._view.publish(CheckpointStaged, path=str(job.paths[0]))
            self._writer.enter(job, can_wait=job.staged is not None)
        except BaseException:
            if self._writer.waiting is job:
                self._writer.take_back()
            if not self._writer.has(job):
                job.release()
            raise

    def replace(self, path: AnyPath) -> None:
        """Skip the waiting job, if any, in favour of ``path``."""
        replaced = self._writer.take_back()
        if replaced is not None:
            replaced.given_up = f"replaced by {path}"
            replaced.release()  # before the skip, so that its memory is free for the next save
            self.skip(replaced)

    def close(self, seconds: float) -> None:
        """Write the queued jobs and end the thread; after ``seconds``, log the jobs that are left."""
        if self._writer.close(seconds):
            return
        left = self._writer.under_way
        if (waiting := self._writer.take_back()) is not None:
            waiting.release()
        log.warning("checkpoints were not written before the run ended", names=[str(job.paths[0]) for job in left])

    def skip(self, job: SaveJob) -> None:
        """Log and publish the reason why a job is not written."""
        self._skipped += 1
        publish_skipped(self._bus, job.paths, job.progress, job.given_up, skipped=self._skipped)

    # ------------------------------------------------------------------------------------------------ on the thread

    def _write_checkpoint(self, job: SaveJob) -> None:
        try:
            with self._bus.span("writing checkpoints"):
                self._write_job(job)
        except BaseException as error:  # noqa: BLE001 - raised on the training thread
            error.add_note(f"{OFFLOADED} writing of {job.paths[0]}")
            self._bus.fail(self, error)

    def _write_job(self, job: SaveJob) -> None:
        done: list[AnyPath] = []
        try:
            if job.source is not None and job.source.given_up:
                job.given_up = job.source.given_up
                self.skip(job)
                return
            self._wait_for_handlers()
            self._commit(job, done)
        except Exception as error:
            job.release()
            self._tell_failed(job, [path for path in job.paths if path not in done], error)
            if job.request.on_error == "raise":
                raise

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

    def _commit(self, job: SaveJob, done: list[AnyPath]) -> None:
        """Write or link every path and collect the durable ones in ``done``; publish those even if a later one fails."""
        start = time.perf_counter()
        source, size = None if job.source is None else job.source.paths[0], 0
        try:
            for path in job.paths:
                if source is not None:
                    self._copy(job, source, path)
                elif job.staged is not None:
                    size = self._write(job, job.staged, path)
                source = source or path
                done.append(path)
                self.failed.discard(path)
        finally:
            if done:
                self.newest = done[0]
                seconds, names = time.perf_counter() - start, [str(path) for path in done]
                payload: dict[str, Any] = {"progress": job.progress, "path": names[0], "names": names}
                self._bus.publish(CheckpointCommitted(**payload, bytes=size, seconds=seconds, stall=job.stall))

    def _tell_failed(self, job: SaveJob, failed: list[AnyPath], error: Exception) -> None:
        if not failed:  # all files are durable: a handler of checkpoint_committed raised
            log.error("a handler of checkpoint_committed failed", path=str(job.paths[0]), exc_info=error)
            return
        self.failed.update(failed)
        names = [str(path) for path in failed]
        log.error("checkpoint not written", names=names, exc_info=error)
        self._bus.publish(CheckpointFailed(progress=job.progress, path=names[0], names=names, error=str(error)))

    def _write(self, job: SaveJob, staged: StagedTree, path: AnyPath) -> int:
        """Write a staged state, with this rank's part of a sharded one; return the file's size in bytes."""

        def write_file() -> int:
            directory = path.parent
            self._make(directory)
            _keep_foreign(path)
            size = write(staged, path).bytes
            self._point(directory, path.name)
            if (home := self._view.work_dir) is not None and home != directory:
                self._make(home)
                self._point(home, str(path) if isinstance(path, RemotePath) else os.path.relpath(path, home))
            return size

        if job.parts is None:
            return write_file()
        size = job.parts.commit(write_file)
        staged.release()  # on ranks that do not write the file
        return size

    def _copy(self, job: SaveJob, source: AnyPath, path: AnyPath) -> None:
        """Link or copy the file ``source`` to ``path``, on the rank that writes."""
        parts = (job.source or job).parts
        if parts is None or parts.first:
            directory = path.parent
            self._make(directory)
            _keep_foreign(path)
            link(source, path)
            if source.parent != directory:
                self._point(directory, path.name)

    def _point(self, directory: AnyPath, name: str) -> None:
        """Have ``last_checkpoint`` in ``directory`` name a file."""
        commit_bytes(self.made[directory], os.fsencode(name))

    def _make(self, directory: AnyPath) -> None:
        # A local directory may have been removed; an object store has none to remove.
        if directory in self.made and (isinstance(directory, RemotePath) or os.path.isdir(directory)):  # noqa: PTH112
            return
        make_directory(directory)
        self.made[directory] = directory / LAST


def _keep_foreign(path: AnyPath) -> None:
    """Keep a file that is not a checkpoint of trainbus under another name, where a checkpoint is about to replace it."""
    if isinstance(path, Path) and path.is_file() and not path.is_symlink() and file_kind(path) != "checkpoint":
        kept = free_name(path.with_name(f"{path.name}.old"))
        path.rename(kept)
        log.warning("a file of another program had the name of a checkpoint, and is kept", path=str(path), to=str(kept))
