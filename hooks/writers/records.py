"""What a logger tells its own lane, between the iterations that the lane hears: see ``hooks.logger``."""

from __future__ import annotations

from typing import Any, ClassVar

from eventloop import Scalars
from eventloop.events import RunEvent


class LogEvent(RunEvent, kw_only=True):
    """Something that a logger has to write. ``logger`` tells which, should there be two on a bus."""

    group: ClassVar[bool] = True
    logger: int = 0


class LogOpened(LogEvent, kw_only=True):
    """A run has begun: writers get ready."""

    name: str = ""
    work_dir: str | None = None
    seed: int | None = None
    config: dict[str, Any]


class LogEpochBegan(LogEvent, kw_only=True):
    """A training epoch of so many batches begins."""

    epoch_length: int | None = None


class LogEpochEnded(LogEvent, kw_only=True):
    """A training epoch has ended."""


class LogMetrics(LogEvent, kw_only=True):
    """A validation or test has ended with ``outputs``."""

    outputs: Scalars


class LogLine(LogEvent, kw_only=True):
    """A line for the log, in the order of the scalars."""

    line: str = ""
    facts: dict[str, Any]


class LogClosed(LogEvent, kw_only=True):
    """A run is over; ``finished`` is False where an exception ended it."""

    finished: bool = True
