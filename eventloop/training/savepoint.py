"""Save points: hooks ask, the run captures once after the last subscriber, a lane writes.

Captured means copied (staged): training goes on while the copy is written. Requests of one moment are one write under
several names; a request for weights that the last write already holds is one more name for that file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from eventloop.bus import Bus
from eventloop.checkpoint import StageBuffer, Staged, commit_bytes, link, stage, write
from eventloop.detach import Owned
from eventloop.errors import ConfigurationError
from eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointStaged, Progress
from eventloop.priority import Priority

OnError = Literal["raise", "log"]

LAST = "last_checkpoint"
"""File in a checkpoint directory that holds the name of the newest committed checkpoint."""

log = structlog.get_logger("trainbus")


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
    """

    def __init__(self, bus: Bus, capture: Callable[[SaveRequest], dict[str, Any]]) -> None:
        self._bus = bus
        self._capture = capture
        self._requests: list[SaveRequest] = []
        self._buffer = StageBuffer()
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
        self._idle.clear()
        publish(CheckpointStaged, path=str(paths[0]), job=job)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._idle.wait()

    def close(self) -> None:
        """Take the writer off the bus; what it was given is still written."""
        self._writer.cancel()

    def write_checkpoint(self, job: SaveJob) -> None:
        """Make one job durable; runs on the writing lane."""
        try:
            committed = self._commit(job)
        except Exception as error:
            # Told as an event, too; on_error="raise" sends it on to the training thread.
            if job.staged is not None:
                job.staged.release()
            self._broken.add(job.paths[0])
            log.exception("checkpoint not written", path=str(job.paths[0]))
            self._bus.publish(CheckpointFailed(progress=job.progress, path=str(job.paths[0]), error=f"{error}"))
            if job.on_error == "raise":
                raise
        else:
            self._bus.publish(committed)
        finally:
            self._idle.set()

    def _commit(self, job: SaveJob) -> CheckpointCommitted:
        size, seconds = 0, 0.0
        first = job.paths[0]
        first.parent.mkdir(parents=True, exist_ok=True)
        if job.staged is not None:
            info = write(job.staged, first)
            size, seconds = info.bytes, info.seconds
            commit_bytes(first.parent / LAST, first.name.encode())
        elif job.source is not None:
            link(job.source, first)
        for path in job.paths[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            link(first, path)
        names = [str(path) for path in job.paths]
        return CheckpointCommitted(progress=job.progress, path=str(first), names=names, bytes=size, seconds=seconds)

    def _holds(self, iteration: int, wanted: SaveRequest) -> bool:
        """True if the last write has these weights and at least what is wanted beside them."""
        if self._written is None or self._written[0] != iteration or self._written[1].path in self._broken:
            return False
        has = self._written[1]
        return has.save_optimizer >= wanted.save_optimizer and has.save_param_scheduler >= wanted.save_param_scheduler


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
