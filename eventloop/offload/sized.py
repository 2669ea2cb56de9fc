"""A lane of captured values with a budget of bytes. Bytes are reserved like slots, and held until the handler is done."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from eventloop.errors import LaneFullError
from eventloop.offload.lane import DROPPED, Lane
from eventloop.offload.snapshot import Snapshot, capture, nbytes

_WARN: Final = threading.Lock()  # instead of a bell: there is room now, and a warning to log without the lock


class SizedLane(Lane):
    """A lane of copies of the values that ``picks`` (the ``capture=`` of the subscription) returns.

    The tensors and arrays that are queued or in the handler have at most ``max_bytes`` together; None counts them only. The
    order is: a slot, then ``picks``, then its bytes, then the copy. So nothing is copied that has no room.
    """

    chunk = 1  # a value that was taken holds its bytes, and cannot be dropped any more

    def __init__(self, label: str, picks: Callable[[Any], Any], *, max_bytes: int | None = None, **options: Any) -> None:
        super().__init__(label, self._captured, **options)
        self._picks = picks
        self.max_bytes = max_bytes
        self._own = threading.local()  # ``bytes`` that this thread has reserved for the event that it is preparing
        self._in_hand: deque[int] = deque()  # sizes of values that were taken and are not counted yet, oldest first

    def put(self, event: Any) -> None:
        """Queue a copy of the captured value, as the policy allows for slots and for bytes.

        Raises:
            LaneFullError: also for a value that is larger than the whole budget.
        """
        self._own.bytes = 0
        try:
            super().put(event)
        except _Refused:  # its slot was given back; now the event counts as published and dropped
            with self._lock:
                self._refused += 1

    def _captured(self, event: Any) -> Snapshot:
        picked = self._picks(event)
        self._own.bytes = 0  # a capture may publish, too
        size = nbytes(picked)
        budget = math.inf if self.max_bytes is None else self.max_bytes
        if size > budget:
            raise LaneFullError(
                f"capture= of {self.label} picked {size:,} bytes, more than its whole max_bytes={budget:,}; give it a larger "
                "budget, or capture less"
            )
        waited = False
        while True:
            with self._lock:
                bell = None
                if self.bytes + size > budget:
                    what = f"{self.bytes:,} of max_bytes={budget:,} wait, and {size:,} more came"
                    bell = self._make_room(what, "max_bytes", partial(self._drop_for, size, budget), waited=waited)
                    if bell is None and self._filled:
                        bell = _WARN
                if bell is None:
                    # Without a call in between: Ctrl-C finds both, or neither.
                    self.bytes += size
                    self._own.bytes = size
                    break
            if self._filled:
                self._warn()
            if bell is DROPPED:
                raise _Refused
            if bell is not _WARN:
                waited = True
                self._wait(bell)
        snapshot = capture(picked)
        snapshot.nbytes = size
        snapshot.source = type(event), getattr(event, "progress", None)
        return snapshot

    def _give_back(self) -> None:
        # Not undone where it was reserved: Ctrl-C may strike after that call has returned (it does where torch.compile has
        # replaced the interpreter's way to call functions).
        self.bytes -= self._own.bytes
        self._own.bytes = 0

    def _drop_for(self, size: int, budget: float) -> bool:
        # Only queued values can make room, not values that the handler or another publisher holds.
        queued = list(self._queue)  # at once: other publishers may append
        if sum(map(self._size, queued)) < self.bytes + size - budget:
            return False
        if self.full == "latest":
            self._drop(len(queued))
        while self.bytes + size > budget:
            self._drop(1)
        return True

    def _size(self, item: Any) -> int:
        size: int = (item[1] if self.contextual else item).nbytes
        return size

    def _drop(self, most: int) -> None:
        for _ in range(min(most, len(self._queue))):
            size = self._size(self._queue[0])
            # Without a call in between, as in the lane's own.
            self.bytes -= size
            super()._drop(1)

    def take(self, most: int) -> list[Any]:
        """Return queued items, oldest first; their slots are free again, their bytes are not yet."""
        items = super().take(most)
        self._in_hand.extend(map(self._size, items))
        return items

    def count(self, *, delivered: int = 0, dropped: int = 0, failed: int = 0) -> None:
        """Count items that the consumer took, oldest first, and free their bytes."""
        with self._lock:
            for _ in range(delivered + dropped + failed):
                self.bytes -= self._in_hand.popleft()
        super().count(delivered=delivered, dropped=dropped, failed=failed)


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """Drop the newest event, because the lane has no room for it."""
