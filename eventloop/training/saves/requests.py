"""A save in three steps: the request of a hook or thread, the job that is made for requests, and the outcome that is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import AnyPath, Busy, StagedTree, Staging
from trainbus.eventloop.checks import check_value
from trainbus.eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointSkipped, CheckpointUploaded, Progress
from trainbus.eventloop.log import get_logger

if TYPE_CHECKING:  # half a second to import, and only sharded models need it
    from trainbus.eventloop.checkpoint.sharded import Parts

log = get_logger()

OnError = Literal["raise", "log"]

_CHOICES: Final = {
    option: (annotation, frozenset(get_args(annotation)))
    for option, annotation in (("busy", Busy), ("staging", Staging), ("on_error", OnError))
}


class SaveRequest(msgspec.Struct, frozen=True):
    """The path of a requested checkpoint, and the options to write it with."""

    path: Path
    leave_out: frozenset[str] = frozenset()
    """Keys to leave out of the checkpoint."""
    on_error: OnError = "raise"
    staging: Staging = "block"
    busy: Busy = "wait"

    def check(self) -> None:
        """Raise ConfigurationError for an unknown option."""
        for option, (annotation, allowed) in _CHOICES.items():
            value = getattr(self, option)
            if type(value) is not str or value not in allowed:  # check_value takes 10 times as long, for its message
                check_value(option, value, annotation)


def merged(requests: list[SaveRequest]) -> SaveRequest:
    """Merge requests into one, with the first path and the safest options."""
    if len(requests) == 1:
        return requests[0]
    return SaveRequest(
        path=requests[0].path,
        leave_out=frozenset.intersection(*(request.leave_out for request in requests)),
        on_error="raise" if any(request.on_error == "raise" for request in requests) else "log",
        # One request may need its copy at once, or must not be skipped.
        staging="overlap" if all(request.staging == "overlap" for request in requests) else "block",
        busy=min((request.busy for request in requests), key=("wait", "replace", "skip").index),
    )


class SaveJob(msgspec.Struct, eq=False):
    """What becomes of requests: a staged state, or an earlier job with the same state, and the names of its file."""

    request: SaveRequest
    paths: list[Path]
    progress: Progress
    version: tuple[int, ...] | None = None
    """Version of the state; None if it is unknown."""
    token: str = ""
    """A random word, new for each save and equal on all ranks."""
    staged: StagedTree | None = None
    stall: float = 0.0
    """Seconds that the training thread spent on it."""
    source: SaveJob | None = None
    given_up: str = ""
    """The reason why it is not written; empty otherwise."""
    states: Callable[[Callable[[], bool]], list[bytes]] | None = None
    """Returns the random states of all ranks, for rank 0; see ``RankStates``. None if there is one rank, and once taken."""
    parts: Parts | None = None
    """This process's part of a sharded state."""
    number: int = -1
    """The position among the written states; -1 for one that is not written yet."""
    held: list[Path] = []
    """The durable files with this state, oldest first."""
    lost: bool = False
    """True if no file has this state: it was given up, or could not be written."""
    digest: str = ""
    """The digest of its files; empty until one is written."""
    scores: Mapping[str, Any] = {}
    """The metrics of the validation of this state; empty until then."""

    def give_up(self, reason: str) -> bool:
        """Have the writer skip it, and release its memory; return True, as it always can."""
        self.given_up, self.lost = reason, True
        self.release()
        return True

    def release(self) -> None:
        """Release the memory of the staged state."""
        for one in (self.staged, self.parts):
            if one is not None:
                one.release()


class SaveOutcome:
    """The outcome of a save: the file is committed, or failed, or was skipped.

    Args:
        bus: the bus that is told.
        paths: the names of the file that the outcome is about, at least one.
        progress: the progress that is in the file.
    """

    def __init__(self, bus: Bus, paths: Sequence[AnyPath], progress: Progress) -> None:
        self._bus, self._progress = bus, progress
        self._names = [str(path) for path in paths]

    def committed(self, *, size: int = 0, seconds: float = 0.0, stall: float = 0.0) -> None:
        """The file is durable; see :class:`~trainbus.eventloop.events.CheckpointCommitted` for the numbers."""
        names = self._names
        event = CheckpointCommitted(
            progress=self._progress, path=names[0], names=names, bytes=size, seconds=seconds, stall=stall
        )
        self._bus.publish(event)

    def failed(self, error: Exception, kept: Path | None = None) -> None:
        """The file could not be written, or not uploaded: then ``kept`` is the file on this machine."""
        names, where = self._names, "" if kept is None else str(kept)
        if kept is None:
            log.error("checkpoint not written", id="checkpoint-not-written", names=names, exc_info=error)
        else:
            log.error(
                "a store did not take a checkpoint; this machine keeps it",
                id="checkpoint-not-uploaded",
                names=names,
                kept=where,
                error=str(error),
            )
        self._bus.publish(CheckpointFailed(progress=self._progress, path=names[0], names=names, error=str(error), kept=where))

    def uploaded(self, file: Path, *, size: int, seconds: float) -> None:
        """A store has the ``file``."""
        event = CheckpointUploaded(progress=self._progress, path=self._names[0], file=str(file), bytes=size, seconds=seconds)
        self._bus.publish(event)

    def skipped(self, reason: str, **more: object) -> None:
        """The save that was asked for is not made."""
        log.warning("checkpoint not made", id="checkpoint-skipped", names=self._names, reason=reason, **more)
        self._bus.publish(CheckpointSkipped(progress=self._progress, path=self._names[0], names=self._names, reason=reason))
