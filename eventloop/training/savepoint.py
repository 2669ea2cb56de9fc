"""Save points: hooks ask, the run captures once after the last subscriber, a lane writes.

Captured means copied (staged): training goes on while the copy is written. Requests of one moment are one write under
several names; a request for weights that the last write already holds is one more name for that file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from eventloop.bus import Bus
from eventloop.checkpoint import StageBuffer, Staged, commit_bytes, link, stage, write
from eventloop.detach import Owned
from eventloop.errors import CheckpointError, ConfigurationError
from eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointStaged, Progress
from eventloop.log import get_logger
from eventloop.priority import Priority

OnError = Literal["raise", "log"]

LAST = "last_checkpoint"
"""File in a checkpoint directory (and in the work dir) that holds the path from there to the newest committed checkpoint."""

log = get_logger()


class SaveRequest(msgspec.Struct, frozen=True):
    """One hook's wish: a file, and what should be in it."""

    path: Path
    save_optimizer: bool = True
    save_param_scheduler: bool = True
    on_error: OnError = "raise"


class SaveJob(msgspec.Struct, frozen=True):
    """What the writing lane gets: staged state (or the committed file that holds it already) and the names to give it."""

    paths: list[Path]
    progress: Progress
    on_error: OnError
    staged: Staged | None = None
    source: Path | None = None


class SavePoints:
    """The requests of a run and the lane that writes them. One save is in flight at a time.

    Args:
        bus: where the checkpoint events are published.
        capture: gathers the state of the run (everything by reference; it is copied here).
        work_dir: of the run; it learns which checkpoint is the newest, wherever that is.
    """

    def __init__(self, bus: Bus, capture: Callable[[SaveRequest], dict[str, Any]], work_dir: Path | None = None) -> None:
        self._bus = bus
        self._capture = capture
        self._work_dir = work_dir
        self._requests: list[SaveRequest] = []
        self._buffer = StageBuffer()
        self._counting = threading.Lock()
        self._flying = 0  # jobs handed over and not done
        self._idle = threading.Event()
        self._idle.set()
        self._written: tuple[int, SaveRequest] | None = None
        self._broken: set[Path] = set()
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

    def request(self, request: SaveRequest) -> None:
        """Note a wish for the next save point.

        Raises:
            ConfigurationError: its directory is a file.
        """
        if request.path.parent.exists() and not request.path.parent.is_dir():
            raise ConfigurationError(f"cannot save to {request.path}: {request.path.parent} is not a directory")
        self._requests.append(request)

    def save(self, iteration: int, publish: Callable[..., None], progress: Progress) -> None:
        """Capture and hand over what was requested. Waits only for a save that is still being written.

        Args:
            iteration: how many iterations the weights have seen; equal numbers are equal weights.
            publish: of the run, for ``checkpoint_staged``.
            progress: of the moment, for the events.
        """
        requests, self._requests = self._requests, []
        merged = _merge(requests)
        paths = list(dict.fromkeys(request.path for request in requests))
        if self._holds(iteration, merged):
            job = SaveJob(paths, progress, merged.on_error, source=self._written[1].path if self._written else None)
        else:
            state = self._capture(merged)
            self.wait()
            job = SaveJob(paths, progress, merged.on_error, staged=stage(state, self._buffer))
            self._written = (iteration, merged)
        with self._counting:
            self._flying += 1
            self._idle.clear()
        try:
            publish(CheckpointStaged, path=str(paths[0]), job=job)
        except BaseException:
            self._landed()  # nobody has the job, so nobody would ever say so
            raise

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._idle.wait()

    def close(self) -> None:
        """Take the writer off the bus; what it was given is still written."""
        self._writer.cancel()

    def check(self) -> None:
        """Copy the state as for a save (into memory that the first save uses), and write nothing.

        Raises:
            CheckpointValueError: it holds something that no checkpoint can hold.
        """
        stage(self._capture(SaveRequest(Path())), self._buffer).release()

    def write_checkpoint(self, job: SaveJob) -> None:
        """Make one job durable; runs on the writing lane."""
        done: list[Path] = []
        try:
            self._commit(job, done)
        except Exception as error:
            # Told as an event, too; on_error="raise" sends it on to the training thread.
            if job.staged is not None:
                job.staged.release()
            self._tell_failed(job, [path for path in job.paths if path not in done], error)
            if job.on_error == "raise":
                raise
        finally:
            self._landed()

    def _commit(self, job: SaveJob, done: list[Path]) -> None:
        """Write or link every name, noting those that are durable in ``done``, and tell of them all the same if one fails."""
        start = time.perf_counter()
        source, size = job.source, 0
        try:
            for path in job.paths:
                _make(path.parent)
                if source is not None:
                    link(source, path)
                elif job.staged is not None:
                    size = write(job.staged, path).bytes
                    self._point_to(path, home=self._work_dir)
                if source is not None and source.parent != path.parent:
                    self._point_to(path)
                source = source or path
                done.append(path)
        finally:
            if done:
                self._tell_committed(job, done, size, time.perf_counter() - start)

    def _point_to(self, path: Path, home: Path | None = None) -> None:
        """Make ``path`` the newest checkpoint of its directory, and of the work dir ``home``."""
        for directory in dict.fromkeys((path.parent, home or path.parent)):
            _make(directory)
            commit_bytes(directory / LAST, os.path.relpath(path, directory).encode())

    def _tell_committed(self, job: SaveJob, done: list[Path], size: int, seconds: float) -> None:
        names = [str(path) for path in done]
        self._bus.publish(CheckpointCommitted(progress=job.progress, path=names[0], names=names, bytes=size, seconds=seconds))

    def _tell_failed(self, job: SaveJob, failed: list[Path], error: Exception) -> None:
        if not failed:  # all are durable: it was a handler of checkpoint_committed
            log.error("a handler of checkpoint_committed failed", path=str(job.paths[0]), exc_info=error)
            return
        self._broken.update(failed)
        names = [str(path) for path in failed]
        log.error("checkpoint not written", names=names, exc_info=error)
        self._bus.publish(CheckpointFailed(progress=job.progress, path=names[0], names=names, error=str(error)))

    def _landed(self) -> None:
        with self._counting:
            self._flying -= 1
            if not self._flying:
                self._idle.set()

    def _holds(self, iteration: int, wanted: SaveRequest) -> bool:
        """True if the last write has these weights and at least what is wanted beside them."""
        if self._written is None or self._written[0] != iteration or self._written[1].path in self._broken:
            return False
        has = self._written[1]
        return has.save_optimizer >= wanted.save_optimizer and has.save_param_scheduler >= wanted.save_param_scheduler


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the directory {directory}: {error}") from error


def _job(event: CheckpointStaged) -> Any:
    return Owned(event.job)  # staged already: pass it on as it is


def _merge(requests: list[SaveRequest]) -> SaveRequest:
    """Return one request with everything that somebody wants, under the first name."""
    return SaveRequest(
        path=requests[0].path,
        save_optimizer=any(request.save_optimizer for request in requests),
        save_param_scheduler=any(request.save_param_scheduler for request in requests),
        on_error="raise" if any(request.on_error == "raise" for request in requests) else "log",
    )
