"""Measure a lane: spans of its queue, its handler and its publishers, and the depth of its queue.

A lane without a meter runs no code for this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any

from trainbus.eventloop.offload.snapshot import Snapshot

AddSpan = Callable[..., object]
"""Records a span: the id of its name, its begin and its end in ns, and ``thread=`` if it is not of this one."""


class LaneMeter:
    """Record the spans of one lane.

    Args:
        add: records one span: the id of its kind, its beginning and end in nanoseconds, and its thread.
        queued: id of spans from the queueing of an event to its delivery, on the consumer's thread.
        handled: id of spans of the handler's calls, on the consumer's thread. Those of async handlers may overlap.
        waiting: id of spans in which a publisher waited for a slot.
        worked: id of spans of calls in a worker process; the number of the process stands for that of the thread.
    """

    def __init__(self, add: AddSpan, *, queued: int, handled: int, waiting: int, worked: int) -> None:
        self._add = add
        self.queued, self.handled, self.waiting, self.worked = queued, handled, waiting, worked
        self.depths = self.deepest = self.arrived = 0
        """The sum and the maximum of the queue's depths that arrived events have seen, and their number."""

    def record_wait(self, wait: Callable[[], object]) -> None:
        """Record a call in which a publisher waits for a slot."""
        began = perf_counter_ns()
        try:
            wait()
        finally:
            self._add(self.waiting, began, perf_counter_ns())

    def record_call(self, handler: Callable[[Any], object], what: Any) -> None:
        """Record a call of the handler."""
        began = perf_counter_ns()
        try:
            handler(what)
        finally:
            self._add(self.handled, began, perf_counter_ns())

    async def record_await(self, called: Awaitable[object]) -> object:
        """Record an awaited call of the handler; return its result."""
        began = perf_counter_ns()
        try:
            return await called
        finally:
            self._add(self.handled, began, perf_counter_ns())

    def record_work(self, process: int, began: int, ended: int) -> None:
        """Record a call in a worker process, which has the same clock as this process."""
        self._add(self.worked, began, ended, thread=process)

    def record_queued(self, item: Any, depth: int) -> Snapshot:
        """Wrap an item of the lane to record its arrival; ``depth`` is the length of the queue with it."""
        if not isinstance(item, Snapshot):
            return _Timed(item, meter=self, queued=perf_counter_ns(), depth=depth)
        fields = (item.value, item.pending, item.finish, item.nbytes, item.source)
        return _Timed(*fields, meter=self, queued=perf_counter_ns(), depth=depth)

    def record_arrival(self, queued: int, depth: int) -> None:
        """Record the delivery of an item; on the consumer's thread only."""
        self._add(self.queued, queued, perf_counter_ns())
        self.arrived += 1
        self.depths += depth
        self.deepest = max(self.deepest, depth)


class _Timed(Snapshot, eq=False, kw_only=True):
    meter: LaneMeter
    queued: int
    depth: int

    def resolve(self) -> Any:
        self.meter.record_arrival(self.queued, self.depth)
        return Snapshot.resolve(self)
