"""One bounded FIFO queue between the publisher and the consumer of an offloaded subscription.

Counting. ``published`` counts places taken in the lane; ``pending`` is what is left of them once delivered, failed and
dropped are taken off, so the four always add up.

Waking. A wake-up per event costs the publisher 10 µs and more, so the consumer stays *armed* after a drain and looks again
after ``linger``; only after an empty look does it disarm, and only a publisher that finds the lane disarmed wakes it. No
wake-up is lost: the consumer disarms first and looks once more afterwards, the publisher appends first and reads the flag
afterwards, so at least one of the two sees the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from eventloop.errors import LaneClosedError, LaneFullError

Full = Literal["block", "drop_old", "drop_new", "latest", "raise"]
FULL: tuple[str, ...] = get_args(Full)

_POLL = 0.2  # seconds between looks at the closed flag while a publisher waits for a place


class LaneStats(msgspec.Struct, frozen=True):
    """Counts of one lane: ``published == delivered + failed + dropped + pending``."""

    published: int = 0
    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0


class DrainReport(msgspec.Struct, frozen=True):
    """What a drain found once it was over, summed over lanes."""

    delivered: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0


class Lane:
    """A bounded queue with a policy for when it is full. Publishers on any thread, one consumer.

    Args:
        label: of the subscription, for errors.
        prepare: turns an event into what is queued; runs on the publisher's thread once a place is secured.
        capacity: places in the lane.
        full: what happens when all are taken: wait, drop the oldest or the newest, keep only the newest, or raise.
        linger: seconds the consumer waits before it looks again.
    """

    def __init__(
        self,
        label: str,
        prepare: Callable[[Any], Any],
        *,
        capacity: int = 1024,
        full: Full = "block",
        linger: float = 0.01,
    ) -> None:
        self.label = label
        self.linger = linger
        self.capacity = capacity
        self.full = full
        self._prepare = prepare
        self._queue: deque[Any] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._taken = 0  # places that are taken: queued, or promised to a publisher that is still preparing
        self._published = 0
        self._delivered = 0
        self._failed = 0
        self._dropped = 0
        self._refused = 0  # the dropped ones that never were in the queue (drop_new)
        self._armed = True  # until a consumer attaches and disarms it, nobody needs waking
        self._wake: Callable[[], object] | None = None
        self._owns: Callable[[], bool] = _nobody
        self._closed = True
        self._reason = ""

    # ------------------------------------------------------------------------------------------- publisher's side

    def put(self, event: Any) -> None:
        """Queue ``event`` as the policy allows; never longer than a lock and a copy unless it has to wait for a place.

        Raises:
            LaneClosedError: no consumer is attached, or the lane closed while waiting.
            LaneFullError: it is full and the policy is ``"raise"``, or waiting would be a deadlock.
        """
        with self._lock:
            if (self._closed or self._taken >= self.capacity) and not self._make_room():
                return
            self._taken += 1
            self._published += 1
        try:
            item = self._prepare(event)
        except BaseException:
            with self._lock:
                self._taken -= 1
                self._published -= 1
                self._changed.notify_all()
            raise
        self._queue.append(item)
        # Read after the append: see the module's docstring.
        if not self._armed:
            self._rouse()

    def _rouse(self) -> None:
        self._armed = True
        try:
            self.wake()
        except BaseException:
            # A KeyboardInterrupt can strike in here. Undone, so that the next publisher wakes the consumer instead.
            self._armed = False
            raise

    def _make_room(self) -> bool:
        """Called with the lock held. False if the event was dropped instead."""
        if self._closed:
            raise self._closed_error()
        match self.full:
            case "block":
                self._wait_for_room()
            case "raise":
                raise LaneFullError(
                    f"the lane of {self.label} is full ({self.capacity} events wait); its handler is slower than its "
                    'events: give it a larger queue=, a filter such as every=, or full="drop_old"'
                )
            case "drop_new":
                self._published += 1
                self._dropped += 1
                self._refused += 1
                return False
            case "drop_old":
                self._drop(1)
            case "latest":
                self._drop(len(self._queue))
        return True

    def _drop(self, most: int) -> None:
        # The consumer may pop at the same time, and a place may belong to a publisher that has not appended yet.
        for _ in range(most):
            try:
                self._queue.popleft()
            except IndexError:
                break
            self._taken -= 1
            self._dropped += 1

    def _wait_for_room(self) -> None:
        if self._owns():
            raise LaneFullError(
                f"the lane of {self.label} is full ({self.capacity} events wait) and its publisher runs on a thread of its own "
                "bus, so waiting could be a deadlock; give the lane a larger queue= or another full= policy"
            )
        self._waiting += 1
        try:
            while self._taken >= self.capacity:
                self._changed.wait(_POLL)
                if self._closed:
                    raise self._closed_error()
        finally:
            self._waiting -= 1

    def _closed_error(self) -> LaneClosedError:
        reason = (
            self._reason or "the bus is not open: wrap the publishing code in `with bus:` (a Run or TrainLoop does it for you)"
        )
        return LaneClosedError(f"{self.label} is offloaded, but {reason}")

    # -------------------------------------------------------------------------------------------- consumer's side

    def attach(self, wake: Callable[[], object], owns: Callable[[], bool]) -> None:
        """Open the lane to publishers. ``wake`` rouses the consumer; ``owns`` says if this thread belongs to the bus."""
        with self._lock:
            self._wake = wake
            self._owns = owns
            self._armed = False
            self._closed = False
            self._reason = ""

    def close(self, reason: str = "") -> None:
        """Let nobody in any more; publishers who wait for a place are released with an error. Idempotent."""
        with self._lock:
            self._closed = True
            self._reason = reason
            self._changed.notify_all()
        self.wake()

    def detach(self) -> None:
        """Forget the consumer: it is gone, and so may be the loop it ran on."""
        with self._lock:
            self._wake = None
            self._owns = _nobody

    @property
    def closed(self) -> bool:
        """True while publishers are refused."""
        return self._closed

    def wake(self) -> None:
        """Rouse the consumer, needed or not."""
        if self._wake is not None:
            self._wake()

    def take(self, most: int) -> list[Any]:
        """Return up to ``most`` queued items, oldest first; their places are free again."""
        items: list[Any] = []
        try:
            while len(items) < most:
                items.append(self._queue.popleft())
        except IndexError:
            pass
        if items:
            with self._lock:
                self._taken -= len(items)
                if self._waiting:
                    self._changed.notify_all()
        return items

    def disarm(self) -> bool:
        """Announce that the consumer is about to sleep; False if something came in meanwhile and it must not."""
        self._armed = False
        if self._queue:
            self._armed = True
            return False
        return True

    def delivered(self, number: int) -> None:
        """Count items whose handler returned."""
        with self._lock:
            self._delivered += number
            if self._waiting:
                self._changed.notify_all()

    def failed(self, number: int) -> None:
        """Count items whose handler raised."""
        with self._lock:
            self._failed += number
            if self._waiting:
                self._changed.notify_all()

    # ----------------------------------------------------------------------------------------------- both sides

    @property
    def stats(self) -> LaneStats:
        """The counts at this moment."""
        with self._lock:
            done = self._delivered + self._failed + self._dropped
            return LaneStats(self._published, self._delivered, self._failed, self._dropped, self._published - done)

    def join(self, deadline: float | None) -> bool:
        """Wait until all that was published before this call is done; False if ``deadline`` (monotonic) came first."""
        self.wake()
        with self._lock:
            # Refused events never stood in line, so they say nothing about how far the line has moved.
            target = self._published - self._refused
            self._waiting += 1
            try:
                while self._delivered + self._failed + self._dropped - self._refused < target:
                    left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
                    if left <= 0:
                        return False
                    self._changed.wait(left)
            finally:
                self._waiting -= 1
        return True


def _nobody() -> bool:
    return False
