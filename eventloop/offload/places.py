"""The places of a lane: how they are counted, and waiting for a change.

Counting. ``published`` counts places taken in the lane; ``pending`` is what is left of them once delivered, failed and
dropped are taken off, so the four always add up, also when Ctrl-C strikes in the publisher.

Places. A publisher takes a place without the lock (which costs half a microsecond and more when the caches are cold, as they
are after a training step): it compares two numbers and adds one, and CPython switches threads, and looks for signals, only
between calls. The lock guards everything else, and the *gate*, the number of places that may be taken in this way. A gate
that is shut without need costs time only: publishers then go by the lock.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Final

from eventloop.offload.deadline import Deadline
from eventloop.offload.reports import LaneStats

POLL = 0.2  # seconds after which somebody who waits looks again, in case Ctrl-C swallowed a notice
SHUT: Final = -1  # a gate that nobody passes
_HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()


class Places:
    """The counts of a lane of so many places, under one lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        # Who waits for a change: one lock each, taken. A Condition would lose track of its own lock when Ctrl-C strikes in it.
        self._waiting: deque[threading.Lock] = deque()
        self._reserved = 0  # places ever taken, with those given back; changed without the lock, so only by += without a call
        self._freed = 0  # places that were free again; those not free are queued, or promised to a publisher that prepares
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
            self._notify()

    def failed(self, number: int) -> None:
        """Count items whose handler raised."""
        with self._lock:
            self._failed += number
            self._notify()

    def dropped(self, number: int) -> None:
        """Count items that the consumer took and will not deliver."""
        with self._lock:
            self._dropped += number
            self._notify()

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
        """Tell who waits that something changed; called with the lock held."""
        self._set_gate()
        while self._waiting:
            self._waiting.popleft().release()

    def _set_gate(self) -> None:
        self._gate = self._freed + self.capacity if _HAS_GIL and not self._closed else SHUT
