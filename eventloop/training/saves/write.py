"""Write saves on a lane of the bus, one at a time and under all their names, and report each by an event."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from eventloop.bus import Bus
from eventloop.bus.priority import Priority
from eventloop.bus.subscription import Subscription
from eventloop.checkpoint import AnyPath, RemotePath, StagedTree, Turns, commit_bytes, link, make_directory, write
from eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointSkipped, CheckpointStaged, Progress, RunView
from eventloop.log import get_logger
from eventloop.offload import Deadline, Owned, collectives_allowed
from eventloop.training.saves.request import SaveRequest

if TYPE_CHECKING:  # a second to import, and only sharded models need it
    from eventloop.checkpoint.sharded import Parts

LAST = "last_checkpoint"
"""File with the relative path (or URL) of the newest committed checkpoint, in its directory and in the work dir."""

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
    """Write jobs in order on a lane of the bus. A later job may replace one that has not begun.

    The work dir gets a pointer to the newest checkpoint in any directory.
    """

    def __init__(self, run: RunView, bus: Bus) -> None:
        self._view = run
        self._bus = bus
        self.turns: Turns[SaveJob] = Turns()
        self.made: dict[AnyPath, AnyPath] = {}
        """Directories that exist durably (a power cut cannot remove them), each with the path of its ``last_checkpoint``."""
        self._late: set[Subscription] = set()  # slow handlers of checkpoint_staged
        self._skipped = 0
        self.newest: AnyPath | None = None
        """The path of the newest durable checkpoint."""
        self.failed: set[AnyPath] = set()
        """Paths that could not be written."""
        self.lane = bus.on(
            CheckpointStaged,
            self.write_checkpoint,
            priority=Priority.LOWEST,
            offload="thread",
            queue=16,
            linger=0,
            capture=_job,
        )

    # --------------------------------------------------------------------------------------- on the training thread

    def hand_over(self, job: SaveJob) -> None:
        """Publish a job to the lane; drop it after an error, unless the lane has begun it."""
        try:
            self.turns.enter(job, can_wait=job.staged is not None)
            self._view.publish(CheckpointStaged, path=str(job.paths[0]), job=job)
        except BaseException:
            if job.staged is None or self.turns.begin(job):
                job.release()
                self.turns.end(job)
            raise

    def replace(self, path: AnyPath) -> None:
        """Skip the waiting job, if any, in favour of ``path``."""
        replaced = self.turns.take_back()
        if replaced is not None:
            replaced.given_up = f"replaced by {path}"
            replaced.release()  # before the skip, so that its memory is free for the next save
            self.skip(replaced)

    def skip(self, job: SaveJob) -> None:
        """Log and publish the reason why a job is not written."""
        self._skipped += 1
        names = [str(path) for path in job.paths]
        log.warning("checkpoint not made", names=names, reason=job.given_up, skipped=self._skipped)
        self._bus.publish(CheckpointSkipped(progress=job.progress, path=names[0], names=names, reason=job.given_up))

    # ----------------------------------------------------------------------------------------------- on the lane

    def write_checkpoint(self, job: SaveJob) -> None:
        """Write one job, unless it was replaced."""
        if job.staged is not None and not self.turns.begin(job):
            return
        done: list[AnyPath] = []
        try:
            if job.source is not None and job.source.given_up:
                job.given_up = job.source.given_up
                self.skip(job)
                return
            self._wait_for_handlers()
            self._commit(job, done)
        except Exception as error:
            # on_error="raise" also raises it on the training thread.
            job.release()
            self._tell_failed(job, [path for path in job.paths if path not in done], error)
            if job.request.on_error == "raise":
                raise
        finally:
            self.turns.end(job)

    def _wait_for_handlers(self) -> None:
        """Wait for the other offloaded handlers of ``checkpoint_staged``, up to half of the bus's ``abort_timeout``."""
        for one in self._bus.subscriptions:
            if one is self.lane or one.lane is None or one.mode == "stream":
                continue
            if self.lane.mount_point not in one.mount_points:
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
                told: dict[str, Any] = {"progress": job.progress, "path": names[0], "names": names}
                self._bus.publish(CheckpointCommitted(**told, bytes=size, seconds=seconds, stall=job.stall))

    def _tell_failed(self, job: SaveJob, failed: list[AnyPath], error: Exception) -> None:
        if not failed:  # all files are durable: a handler of checkpoint_committed raised
            log.error("a handler of checkpoint_committed failed", path=str(job.paths[0]), exc_info=error)
            return
        self.failed.update(failed)
        names = [str(path) for path in failed]
        # on_error="raise" logs the traceback when it leaves the handler.
        detail = {"error": str(error)} if job.request.on_error == "raise" else {"exc_info": error}
        log.error("checkpoint not written", names=names, **detail)
        self._bus.publish(CheckpointFailed(progress=job.progress, path=names[0], names=names, error=str(error)))

    def _write(self, job: SaveJob, staged: StagedTree, path: AnyPath) -> int:
        """Write a staged state, with this rank's part of a sharded one; return the file's size in bytes."""

        def write_file() -> int:
            directory = path.parent
            self._make(directory)
            size = write(staged, path).bytes
            self._point(directory, path.name)
            if (home := self._view.work_dir) is not None and home != directory:
                self._make(home)
                self._point(home, str(path) if isinstance(path, RemotePath) else os.path.relpath(path, home))
            return size

        if job.parts is None:
            return write_file()
        with collectives_allowed():  # they use their own process group
            size = job.parts.commit(write_file)
        staged.release()  # on ranks that do not write the file
        return size

    def _copy(self, job: SaveJob, source: AnyPath, path: AnyPath) -> None:
        """Link or copy the file ``source`` to ``path``, on the rank that writes."""
        parts = (job.source or job).parts
        if parts is None or parts.first:
            directory = path.parent
            self._make(directory)
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


def _job(event: CheckpointStaged) -> Any:
    return Owned(event.job)  # staged already: no copy
