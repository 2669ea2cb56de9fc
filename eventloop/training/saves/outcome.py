"""What became of a save, told to the log and on the bus: of loops of one's own and of other trainers alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import AnyPath
from trainbus.eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointSkipped, Progress
from trainbus.eventloop.log import get_logger

log = get_logger()


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
        """The file could not be written; ``kept`` is the one in the work dir that holds the save meanwhile."""
        names, where = self._names, "" if kept is None else str(kept)
        if kept is None:
            log.error("checkpoint not written", names=names, exc_info=error)
        else:
            log.error("a store did not take a checkpoint; the work dir keeps it", names=names, kept=where, error=str(error))
        self._bus.publish(CheckpointFailed(progress=self._progress, path=names[0], names=names, error=str(error), kept=where))

    def skipped(self, reason: str, **more: object) -> None:
        """The save that was asked for is not made."""
        log.warning("checkpoint not made", names=self._names, reason=reason, **more)
        self._bus.publish(CheckpointSkipped(progress=self._progress, path=self._names[0], names=self._names, reason=reason))
