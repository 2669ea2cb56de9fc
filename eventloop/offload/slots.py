"""The slots of a lane's queue: how they are counted, and waiting for a change.

Counting. ``published`` counts slots taken in the lane. ``pending`` is what is left of them once delivered, failed and dropped
are taken off, so the four always add up, also when Ctrl-C strikes in the publisher.

Reserving. A publisher reserves a slot without the lock (which costs half a microsecond and more when the caches are cold, as
they are after a training step): it compares two numbers and adds one, and CPython switches threads, and looks for signals,
only between calls. The lock guards everything else, and the *gate*, the number of slots that may be reserved in this way. A
gate that is shut without need costs time only: publishers then go by the lock.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from typing import Final

import msgspec

POLL = 0.2  # seconds after which a waiting thread looks again, in case Ctrl-C swallowed a notice
SHUT: Final = -1  # a gate that lets no publisher pass
_HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()


class Deadline:
    """A moment until which a thread waits; another thread may move it nearer meanwhile.

    Args:
        seconds: from now on; None waits for as long as it takes.
    """

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
    """What a drain found once it was over, summed over lanes."""

    delivered: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0

    def __add__(self, other: DrainReport) -> DrainReport:
        return DrainReport(
            self.delivered + other.delivered,
            self.dropped + other.dropped,
            self.failed + other.failed,
            self.pending + other.pending,
        )


class LaneStats(msgspec.Struct, frozen=True):
    """Counts of one lane: ``published == delivered + failed + dropped + pending``."""

    published: int = 0
    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0

    def since(self, before: LaneStats) -> DrainReport:
        """Return what was counted since ``before``, and what is pending now."""
        return DrainReport(
            self.delivered - before.delivered, self.dropped - before.dropped, self.failed - before.failed, self.pending
        )


class Slots:
    """The counts of a lane of ``capacity`` slots, under one lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        # Locks, all taken, of threads that wait for a change. A Condition would lose track of its own lock at a Ctrl-C in it.
        self._waiting: deque[threading.Lock] = deque()
        self._reserved = 0  # slots ever taken, with those given back; changed without the lock, so only by += without a call
        self._freed = 0  # slots that were free again; those not free are queued, or reserved by a publisher that prepares
        self._gate = SHUT  # how far ``_reserved`` may go without the lock; changed with the lock held
        self._returned = 0  # the ones given back, because preparing failed
        self._delivered = 0
        self._failed = 0
        self._dropped = 0
        self._refused = 0  # the dropped ones that never were in the queue
        self._closed = True

    @property
    def stats(self) -> LaneStats:
        """The counts at this moment."""
        with self._lock:
            published = self._reserved - self._returned
            pending = published - self._delivered - self._failed - self._dropped
            return LaneStats(published, self._delivered, self._failed, self._dropped, pending)

    def delivered(self, number: int) -> None:
        """Count items whose handler returned."""
        with self._lock:
            self._delivered += number
            self._let_go(number)
            self._notify()

    def failed(self, number: int) -> None:
        """Count items whose handler raised."""
        with self._lock:
            self._failed += number
            self._let_go(number)
            self._notify()

    def dropped(self, number: int) -> None:
        """Count items that the consumer took and will not deliver."""
        with self._lock:
            self._dropped += number
            self._let_go(number)
            self._notify()

    def _let_go(self, number: int) -> None:
        """Give back what the next items that the consumer took have reserved; called with the lock held."""

    def _settled(self, deadline: Deadline) -> bool:
        """Wait until all that was published before this call is done; False if ``deadline`` came first."""
        target = None
        while True:
            with self._lock:
                # Refused events never stood in line, so they say nothing about how far the line has moved.
                if target is None:
                    target = self._reserved - self._refused
                if self._returned + self._delivered + self._failed + self._dropped - self._refused >= target:
                    return True
                bell = self._bell()
            left = deadline.left
            if not left:
                return False
            bell.acquire(timeout=min(POLL, left))  # looks again, too, as the deadline may have been moved nearer

    def _refuse(self) -> None:
        """Count an event as published and dropped; called with the lock held."""
        self._reserved += 1
        self._freed += 1
        self._dropped += 1
        self._refused += 1

    def _bell(self) -> threading.Lock:
        """Return a lock that is released when something changes; called with the lane's own lock held."""
        bell = threading.Lock()
        bell.acquire()
        self._waiting.append(bell)
        return bell

    def _notify(self) -> None:
        """Wake the waiting threads: something has changed; called with the lock held."""
        self._set_gate()
        while self._waiting:
            self._waiting.popleft().release()

    def _set_gate(self) -> None:
        self._gate = self._freed + self.capacity if _HAS_GIL and not self._closed else SHUT
