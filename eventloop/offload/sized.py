"""A lane of captured values, which have a size. Bytes are taken like places, and held until the handler is done with them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from eventloop.errors import LaneFullError
from eventloop.offload.lane import Lane
from eventloop.offload.snapshot import Snapshot, capture, nbytes


class SizedLane(Lane):
    """A lane of copies of what ``capture`` picks: of at most ``max_bytes`` together, with those in the handler's hands.

    The order is: a place, then ``capture``, then its bytes, then the copy. So nothing is copied that has no room.

    Args:
        label: of the subscription, for errors.
        capture: picks what is queued from the event.
        max_bytes: budget for the tensors and arrays of what is queued and what is being handled; None counts only.
        **options: of :class:`Lane`.
    """

    chunk = 1  # what was taken holds its bytes, and cannot be dropped any more

    def __init__(self, label: str, capture: Callable[[Any], Any], *, max_bytes: int | None = None, **options: Any) -> None:
        super().__init__(label, self._captured, **options)
        self._capture = capture
        self.max_bytes = max_bytes
        self._bytes = 0
        self._own = _Own()
        self._in_hand: deque[int] = deque()  # sizes of what was taken and is not accounted for, oldest first

    @property
    def bytes(self) -> int:
        """Size of what is pending."""
        return self._bytes

    def put(self, event: Any) -> None:
        """Queue a copy of what ``capture`` picks, as the policy allows for places and for bytes.

        Raises:
            LaneFullError: also for a value that is larger than the whole budget.
        """
        self._own.bytes = 0
        try:
            super().put(event)
        except _Refused:  # its place was given back; now it counts as published and dropped
            with self._lock:
                self._refuse()

    def _captured(self, event: Any) -> Snapshot:
        picked = self._capture(event)
        self._own.bytes = 0  # a capture may publish, too
        size = nbytes(picked)
        waited = False
        while True:
            with self._lock:
                bell = None
                if self.max_bytes is not None and self._bytes + size > self.max_bytes:
                    bell = self._make_bytes(size, self.max_bytes, waited=waited)
                if bell is None:
                    # Without a call in between: Ctrl-C finds both, or neither.
                    self._bytes += size
                    self._own.bytes = size
                    break
            waited = True
            self._wait(bell)
        staged = capture(picked)
        staged.nbytes = size
        staged.source = type(event), getattr(event, "progress", None)
        return staged

    def _give_back(self) -> None:
        # Not undone where it was reserved: Ctrl-C may strike after that call has returned (it does where torch.compile has
        # replaced the interpreter's way to call functions).
        self._bytes -= self._own.bytes
        self._own.bytes = 0

    def _make_bytes(self, size: int, budget: int, *, waited: bool) -> threading.Lock | None:
        """Called with the lock held. None if there is room now, else what to wait for."""
        if size > budget:
            raise LaneFullError(
                f"capture= of {self.label} picked {size:,} bytes, more than its whole max_bytes={budget:,}; give it a larger "
                "budget, or capture less"
            )
        if self._closed or (self._retired and waited):
            if self._retired and self.full != "block":
                raise _Refused  # a stream that was left: nobody is told of an error
            raise self._closed_error()
        if self.full == "block":
            return self._wait_for_room(f"{self._bytes:,} of {budget:,} bytes wait")
        if self.full == "raise":
            raise LaneFullError(
                f"the lane of {self.label} is full ({self._bytes:,} of max_bytes={budget:,} wait, and {size:,} more came); "
                'its handler is slower than its events: give it a larger max_bytes=, a filter like every=, or full="drop_old"'
            )
        if self.full != "drop_new":
            # Only what is queued can make room: not what is in the handler's hands, or another publisher's.
            queued = [self._size(index) for index in range(len(self._queue))]
            excess = self._bytes + size - budget
            if sum(queued) >= excess:
                if self.full == "latest":
                    self._drop(len(queued))
                while self._bytes + size > budget:
                    self._drop(1)
                return None
        raise _Refused

    def _size(self, index: int) -> int:
        item = self._queue[index]
        size: int = (item[1] if self.contextual else item).nbytes
        return size

    def _drop(self, most: int) -> None:
        for _ in range(min(most, len(self._queue))):
            size = self._size(0)
            # Without a call in between, as in the lane's own.
            self._bytes -= size
            super()._drop(1)

    def take(self, most: int) -> list[Any]:
        """Return queued items, oldest first; their places are free again, their bytes are not yet."""
        items = super().take(most)
        self._in_hand.extend((item[1] if self.contextual else item).nbytes for item in items)
        return items

    def delivered(self, number: int) -> None:
        """Count items whose handler returned."""
        self._let_go(number)
        super().delivered(number)

    def failed(self, number: int) -> None:
        """Count items whose handler raised."""
        self._let_go(number)
        super().failed(number)

    def dropped(self, number: int) -> None:
        """Count items that the consumer took and will not deliver."""
        self._let_go(number)
        super().dropped(number)

    def _let_go(self, number: int) -> None:
        # The consumer accounts for items in the order in which it took them.
        with self._lock:
            for _ in range(number):
                self._bytes -= self._in_hand.popleft()


class _Own(threading.local):
    """Bytes that this thread has reserved for the event that it is preparing."""

    bytes = 0


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """There is no room for the newest, which is to be dropped."""
