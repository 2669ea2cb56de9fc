"""The deadline of a drain, and its report."""

from __future__ import annotations

import math
import time
from operator import add

import msgspec
from msgspec.structs import astuple


class Deadline:
    """A deadline in ``seconds`` from now, or none, for a waiting thread. Another thread may shorten it meanwhile."""

    def __init__(self, seconds: float | None) -> None:
        self._at = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never below 0; infinity without a limit."""
        return max(0.0, self._at - time.monotonic())

    def shorten(self, seconds: float) -> None:
        """Wait for at most ``seconds`` from now on."""
        self._at = min(self._at, time.monotonic() + seconds)


class DrainReport(msgspec.Struct, frozen=True):
    """Counts of events at one moment: of one lane, or summed over the lanes of a bus since it opened."""

    delivered: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0

    @property
    def published(self) -> int:
        """The sum of the others."""
        return self.delivered + self.dropped + self.failed + self.pending

    def __add__(self, other: DrainReport) -> DrainReport:
        return DrainReport(*map(add, astuple(self), astuple(other)))

    def since(self, before: DrainReport) -> DrainReport:
        """Return the counts since ``before``, and the events that are pending now."""
        return DrainReport(
            self.delivered - before.delivered, self.dropped - before.dropped, self.failed - before.failed, self.pending
        )
