"""A lane of captured values with a budget of bytes. Bytes are reserved like slots, and held until the handler is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from itertools import accumulate
from typing import Any

from trainbus.eventloop.errors import LaneFullError
from trainbus.eventloop.offload.lane import Lane, Mark
from trainbus.eventloop.offload.snapshot import Snapshot, capture, delayed, nbytes


class SizedLane(Lane):
    """A lane of copies of the values that ``picks`` (the ``capture=`` of the subscription) returns.

    The tensors and arrays that are queued or in the handler have at most ``max_bytes`` together; None counts them only. The
    order is: a slot, then ``picks``, then its bytes, then the copy. So nothing is copied that has no room.

    A publish holds its slot and its bytes under a key of its own until its copy is queued. Giving them back twice does nothing,
    and is one call of C code, so that it does not matter where Ctrl-C strikes, nor how often.
    """

    chunk = 1  # a value that was taken holds its bytes, and cannot be dropped any more

    def __init__(self, label: str, picks: Callable[[Any], Any], *, max_bytes: int | None = None, **options: Any) -> None:
        super().__init__(label, picks, **options)
        self.max_bytes = max_bytes
        self._reserved: dict[object, int] = {}  # the bytes of each publish that has a slot, and no copy in the queue yet

    @property
    def bytes(self) -> int:
        """Size of the captured tensors that are pending."""
        with self._lock:
            return sum(list(self._reserved.values())) + sum(self._sizes((*self._queue, *self._held)))

    def put(self, event: Any, behind: tuple[Mark, ...] = ()) -> None:
        """Queue a copy of the captured value, as the policy allows for slots and for bytes.

        Raises:
            LaneFullError: also for a value that is larger than the whole budget.
        """
        publish = object()
        try:
            if self._admit(self._full, "queue", self._drop_for_slot, partial(self._reserved.setdefault, publish, 0)):
                picked = self._make_item(event)
                size = nbytes(picked)
                if self._reserve(publish, size):
                    snapshot = delayed(capture(picked), behind) if behind else capture(picked)
                    snapshot.nbytes = size
                    snapshot.source = type(event), getattr(event, "progress", None)
                    self._queue_reserved(publish, snapshot)
        finally:
            # One call of C code, before which Python looks for no other Ctrl-C. If one skips the rest, publishers that wait
            # look again after POLL.
            reserved = self._reserved.pop(publish, None)
            if reserved is not None:
                self._tell_of_room()

    def _reserve(self, publish: object, size: int) -> bool:
        """Wait for bytes, or make room for them, as the policy allows; return False if the value was dropped."""
        if self.max_bytes is not None and size > self.max_bytes:
            raise LaneFullError(
                f"capture= of {self.label} picked {size:,} bytes, more than its whole max_bytes={self.max_bytes:,}; give it a "
                "larger budget, or capture less"
            )
        accept = partial(self._reserved.__setitem__, publish, size)
        return self._admit(partial(self._lacks, size), "max_bytes", partial(self._drop_for, size), accept)

    def _queue_reserved(self, publish: object, snapshot: Snapshot) -> None:
        timed = snapshot if self.meter is None else self.meter.record_queued(snapshot, self._used())
        item: Any = (copy_context(), timed) if self.contextual else timed
        with self._lock:
            if self.number is not None:
                item = copy_context(), timed, self.number()
            self._queue.append(item)
            self._reserved.pop(publish)
            asleep = not self._armed
        if asleep:
            self._wake_up()

    def _tell_of_room(self) -> None:
        with self._lock:
            self._notify()
        if self.ending:
            self.wake()  # the consumer may have stayed for this slot only

    def _lacks(self, size: int) -> str:
        if self.max_bytes is None or (used := self.bytes) + size <= self.max_bytes:
            return ""
        return f"{used:,} of max_bytes={self.max_bytes:,} wait, and {size:,} more came"

    def _drop_for(self, size: int) -> bool:
        # Only queued values can make room, not values that the handler or another publisher holds.
        excess = self.bytes + size - (self.max_bytes or 0)
        queued = self._sizes(self._queue)
        if sum(queued) < excess:
            return False
        number = (
            len(queued)
            if self.full == "latest"
            else next(n for n, so_far in enumerate(accumulate(queued), 1) if so_far >= excess)
        )
        self._drop(number)
        return True

    def _sizes(self, items: Iterable[Any]) -> list[int]:
        return [snapshot.nbytes for snapshot in self.values([*items])]

    def _used(self) -> int:
        return len(self._queue) + len(self._reserved)
