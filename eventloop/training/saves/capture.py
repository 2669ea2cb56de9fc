"""Save points: hooks ask, the run captures once after the last subscriber, a lane writes.

Captured means copied (staged): training goes on while the copy is written. Requests of one moment are one write under
several names; a request for weights that the last write already holds is one more name for that file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from eventloop.bus import Bus
from eventloop.bus.priority import Priority
from eventloop.bus.subscription import Subscription
from eventloop.checkpoint import AnyPath, Overlap, StageBuffer, Turns, check_busy, check_staging, stage
from eventloop.errors import ConfigurationError
from eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointSkipped, CheckpointStaged, Progress
from eventloop.log import get_logger
from eventloop.offload import Deadline, Owned
from eventloop.training.saves.request import SaveRequest, check_together, merged
from eventloop.training.saves.write import CheckpointFiles, Parts, SaveJob

log = get_logger()


class SavePoints:
    """The requests of a run and the lane that writes them. One save is in flight at a time.

    Args:
        bus: where the checkpoint events are published.
        capture: gathers the state of the run (everything by reference; it is copied here).
        work_dir: of the run; it learns which checkpoint is the newest, wherever that is.
        optimizers: of the run; with ``staging="overlap"`` what only they change is copied up to their next step.
        shards: takes what is spread over processes out of the state, where anything is. Then every process saves.
    """

    def __init__(
        self,
        bus: Bus,
        capture: Callable[[SaveRequest], dict[str, Any]],
        work_dir: Path | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        shards: Callable[[dict[str, Any], Any], tuple[dict[str, Any], Parts]] | None = None,
    ) -> None:
        self._bus = bus
        self._capture = capture
        self._files = CheckpointFiles(work_dir)
        self._shards = shards
        self._requests: list[SaveRequest] = []
        self._buffer = StageBuffer()
        self._overlap = Overlap(optimizers)
        self._turns: Turns[SaveJob] = Turns()
        self._written: tuple[object, SaveRequest, SaveJob] | None = None
        self._given: set[AnyPath] = set()  # the names of the last write, links included
        self._broken: set[AnyPath] = set()
        self._late: set[Subscription] = set()  # handlers of checkpoint_staged that took too long
        self.skipped = 0
        """Saves that were asked for and not made: another was being written, or the run had not trained."""
        self._writer = bus.on(
            CheckpointStaged,
            self.write_checkpoint,
            priority=Priority.LOWEST,
            offload="thread",
            queue=16,
            capture=_job,
        )

    @property
    def requested(self) -> bool:
        """True if somebody waits for a save."""
        return bool(self._requests)

    @property
    def names(self) -> list[str]:
        """The names of the files that are to be saved next."""
        return [request.path.name for request in self._requests]

    def standing(self, version: object) -> tuple[bool, bool]:
        """Return whether what is to be saved is in the last file already, and whether another save is being written."""
        return bool(self._requests) and self._holds(version, merged(self._requests)), self._turns.busy

    @property
    def requests(self) -> list[SaveRequest]:
        """What is to be saved next."""
        return list(self._requests)

    def adopt(self, requests: list[SaveRequest]) -> None:
        """Take these for what is to be saved next, instead of what was asked for here."""
        self._requests = list(requests)

    def request(self, request: SaveRequest) -> None:
        """Note a wish for the next save point.

        Raises:
            ConfigurationError: its directory is a file, or an option is unknown.
        """
        check_busy(request.busy)
        check_staging(request.staging)
        if self._shards is not None:
            check_together(request)
        directory = request.path.parent
        if not self._files.made(directory) and directory.exists() and not directory.is_dir():
            raise ConfigurationError(f"cannot save to {request.path}: {directory} is not a directory")
        self._requests.append(request)

    def refuse(self, request: SaveRequest, progress: Progress, reason: str) -> None:
        """Log and publish that a request is not met."""
        self._tell_skipped(SaveJob([request.path], progress, request.on_error, given_up=reason))

    def save(
        self,
        version: object,
        publish: Callable[..., None],
        progress: Progress,
        *,
        at_once: bool = False,
        standing: tuple[bool, bool] | None = None,
    ) -> None:
        """Capture and hand over what was requested. Waits at most for a save that is still being written.

        Args:
            version: of the state; the last file holds it if that was written at an equal one.
            publish: of the run, for ``checkpoint_staged``.
            progress: of the moment, for the events.
            at_once: copy everything now, also what was to be copied beside the training.
            standing: what to go by instead of :meth:`standing` here, where processes save together.
        """
        held, busy = standing or self.standing(version)
        requests, self._requests = self._requests, []
        wanted = merged(requests)
        paths = list(dict.fromkeys(request.path for request in requests))
        if held:
            paths = [path for path in paths if path not in self._given or path in self._broken]
            if not paths:
                return
            self._given.update(paths)
            job = SaveJob(paths, progress, wanted.on_error, source=self._written[2] if self._written else None)
            enter = self._turns.enter_for_good
        elif wanted.busy == "skip" and busy:
            self._tell_skipped(SaveJob(paths, progress, wanted.on_error, given_up="another checkpoint is being written"))
            return
        else:
            job = self._stage(paths, progress, wanted, at_once=at_once)
            enter = self._turns.enter
            self._written = (version, wanted, job)
            self._given = set(paths)
        try:
            enter(job)
            publish(CheckpointStaged, path=str(paths[0]), job=job)
        except BaseException:
            self._call_off(job)  # nobody has it, so nobody would ever say so
            raise

    def _stage(self, paths: list[AnyPath], progress: Progress, wanted: SaveRequest, *, at_once: bool) -> SaveJob:
        state = self._capture(wanted)
        if wanted.busy == "wait":
            self.wait()
        replaced = self._turns.take_back()
        if replaced is not None:
            replaced.given_up = f"replaced by {paths[0]}"
            _release(replaced)  # first, so that its memory can be used again
            self._tell_skipped(replaced)
        overlap = self._overlap if wanted.staging == "overlap" and not at_once else None
        parts: Parts | None = None
        if self._shards is not None:
            state, parts = self._shards(state, paths[0])
        return SaveJob(paths, progress, wanted.on_error, staged=stage(state, self._buffer, overlap=overlap), parts=parts)

    def _call_off(self, job: SaveJob) -> None:
        if job.staged is None or self._turns.begin(job):  # else it is being written: Ctrl-C came after the lane had taken it
            _release(job)
            self._turns.end(job)
            self._written = None

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._turns.wait()

    def close(self) -> None:
        """Take the writer off the bus, and the fences off the optimizers; what was given is still written."""
        self._overlap.close()
        self._writer.cancel()

    def check(self, request: SaveRequest, *, copy: bool) -> list[str]:
        """With ``copy``, copy the state as for a save (into memory that the first save uses); write nothing.

        Returns:
            The keys that the checkpoint would have; none without ``copy``.

        Raises:
            CheckpointValueError: it holds something that no checkpoint can hold.
            ConfigurationError: the processes cannot save like this.
        """
        if self._shards is not None:
            check_together(request)
        if not copy:
            return []
        state = self._capture(msgspec.structs.replace(request, path=Path()))  # hooks know a check by its path
        keys = list(state)
        if self._shards is not None:
            state, _ = self._shards(state, Path("check"))
        stage(state, self._buffer).release()
        return keys

    def write_checkpoint(self, job: SaveJob) -> None:
        """Make one job durable, unless it was replaced; runs on the writing lane."""
        if job.staged is not None and not self._turns.begin(job):
            return
        done: list[AnyPath] = []
        try:
            if job.source is not None and job.source.given_up:
                job.given_up = job.source.given_up
                self._tell_skipped(job)
                return
            self._wait_for_handlers()
            self._commit(job, done)
        except Exception as error:
            # Told as an event, too; on_error="raise" sends it on to the training thread.
            _release(job)
            self._tell_failed(job, [path for path in job.paths if path not in done], error)
            if job.on_error == "raise":
                raise
        finally:
            self._turns.end(job)

    def _wait_for_handlers(self) -> None:
        """Wait until the other offloaded handlers of ``checkpoint_staged`` are done, but not for ever."""
        for one in self._bus.subscriptions:
            if (
                one is self._writer
                or one.lane is None
                or one.mode == "stream"
                or self._writer.mount_point not in one.mount_points
            ):
                continue
            patience = 0.0 if one in self._late else self._bus.abort_timeout / 2  # less than a run that ends by an error has
            if one.lane.join(Deadline(patience)):
                self._late.discard(one)
            elif one not in self._late:
                self._late.add(one)
                log.warning("a checkpoint does not wait any longer for a handler of its event", handler=one.label)

    def _commit(self, job: SaveJob, done: list[AnyPath]) -> None:
        """Write or link every name, noting those that are durable in ``done``, and tell of them all the same if one fails."""
        start = time.perf_counter()
        source, size = None if job.source is None else job.source.paths[0], 0
        try:
            for path in job.paths:
                if source is not None:
                    self._files.copy(job, source, path)
                elif job.staged is not None:
                    size = self._files.write(job, job.staged, path)
                source = source or path
                done.append(path)
        finally:
            if done:
                self._tell_committed(job, done, size, time.perf_counter() - start)

    def _tell_committed(self, job: SaveJob, done: list[AnyPath], size: int, seconds: float) -> None:
        names = [str(path) for path in done]
        self._bus.publish(CheckpointCommitted(progress=job.progress, path=names[0], names=names, bytes=size, seconds=seconds))

    def _tell_failed(self, job: SaveJob, failed: list[AnyPath], error: Exception) -> None:
        if not failed:  # all are durable: it was a handler of checkpoint_committed
            log.error("a handler of checkpoint_committed failed", path=str(job.paths[0]), exc_info=error)
            return
        self._broken.update(failed)
        names = [str(path) for path in failed]
        log.error("checkpoint not written", names=names, exc_info=error)
        self._bus.publish(CheckpointFailed(progress=job.progress, path=names[0], names=names, error=str(error)))

    def _tell_skipped(self, job: SaveJob) -> None:
        names = [str(path) for path in job.paths]
        self.skipped += 1
        log.warning("checkpoint not made", names=names, reason=job.given_up, skipped=self.skipped)
        self._bus.publish(CheckpointSkipped(progress=job.progress, path=names[0], names=names, reason=job.given_up))

    def _holds(self, version: object, wanted: SaveRequest) -> bool:
        """True if the last write has this state and at least what is wanted of it."""
        if self._written is None or self._written[0] != version or self._written[1].path in self._broken:
            return False
        return self._written[1].leave_out <= wanted.leave_out


def _job(event: CheckpointStaged) -> Any:
    return Owned(event.job)  # staged already: pass it on as it is


def _release(job: SaveJob) -> None:
    if job.staged is not None:
        job.staged.release()
