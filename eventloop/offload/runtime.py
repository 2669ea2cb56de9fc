"""Run the consumers of a bus: a thread for each blocking handler or hook, one event loop for all async ones."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from trainbus.eventloop.locks import is_held, new_lock
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload.callers import Caller, OwnedThread
from trainbus.eventloop.offload.collectives import refuses_collectives
from trainbus.eventloop.offload.consumers import Consumer, TaskConsumer, ThreadConsumer
from trainbus.eventloop.offload.delivery import Delivery
from trainbus.eventloop.offload.drain import Deadline, DrainReport
from trainbus.eventloop.offload.lane import Lane
from trainbus.eventloop.offload.loops import CANCEL_GRACE, Backend, HostLoop, LoopThread, handling
from trainbus.eventloop.offload.ordered import OrderedLanes
from trainbus.eventloop.offload.process import ProcessCaller

log = get_logger()

ENDED = (
    "its event loop has ended: the bus was opened in that loop by `async with bus:`, and not closed in it. bus.close() closes "
    "it; open it again in the loop that runs"
)
"""Why a bus whose event loop has ended takes no event, for errors."""


class Runtime:
    """The consumers of an open bus: made when the bus opens, thrown away when it has closed.

    Args:
        loop: runs async handlers: the loop of the host, or one with this backend on a thread of the bus.
        interrupt: called on a thread that is about to wait for a slot in a lane; may raise instead.
    """

    def __init__(self, loop: HostLoop | Backend = "asyncio", interrupt: Callable[[], object] = lambda: None) -> None:
        self._loop = loop if isinstance(loop, HostLoop) else LoopThread(loop, self)
        if isinstance(loop, HostLoop):
            loop.pending, loop.on_end = self._tasks_pending, self._lose_tasks
        self._interrupt = interrupt
        self._mark = object()
        self._consumers: set[Consumer] = set()  # that run, or have ended since the last look at them
        self._added: deque[Consumer] = deque()  # that are not started
        self._forgets_at = 16
        self._past = DrainReport()  # of consumers that have ended
        self._lock = new_lock()
        self._closing = False
        self.lost: Counter[str] = Counter()
        """The number of events, by lane, that were dropped because the event loop ended before the bus was closed."""

    def serve(self, label: str, deliveries: Sequence[Delivery], number: Callable[[], int] | None = None) -> None:
        """Add the consumer of lanes of one mode: a task in the event loop for async handlers, else a thread.

        It starts with the first event, or by :meth:`start`. Nothing here waits.

        Args:
            label: name of the consumer.
            deliveries: the lanes and their handlers.
            number: what numbers the events of several lanes.
        """
        lanes = deliveries[0].lane if number is None else OrderedLanes([one.lane for one in deliveries], number)
        first, deliveries = deliveries[0], [_checked(one) for one in deliveries]
        consumer: Consumer
        if first.is_async:
            consumer = TaskConsumer(label, deliveries, lanes, self._loop, self._mark)
        else:
            caller = ProcessCaller(label, deliveries) if first.in_process else Caller(label, deliveries, self)
            consumer = ThreadConsumer(label, deliveries, lanes, caller, self)
        if len(self._consumers) >= self._forgets_at:
            self._forgets_at = 2 * len(self._serving()) + 16  # forgets consumers that have ended, at little cost for each
        for one in deliveries:
            one.lane.attach(partial(self._wake, consumer), self._must_not_wait)
        with self._lock:
            self._consumers.add(consumer)
        self._added.append(consumer)

    def start(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start the consumers that were added, and wait for the event loop of async ones. Hold no lock.

        It does not wait where ``interrupted`` returns True: this is the handler of a signal, and its thread holds a lock.

        Raises:
            BusStateError: the event loop does not start.
        """
        waits = False
        while self._added:
            with suppress(IndexError):  # another thread starts it
                consumer = self._added.popleft()
                waits = waits or isinstance(consumer, TaskConsumer)
                self._wake(consumer)
        if waits and (self._loop.ended or not self._loop.takes_tasks) and not interrupted():
            self._loop.start()

    def is_held(self) -> bool:
        """Return True if this thread holds the lock of the runtime."""
        return is_held(self._lock)

    @property
    def inside(self) -> bool:
        """True in an offloaded handler: waiting for the bus there would be waiting for itself."""
        thread = threading.current_thread()
        return handling.get() is self._mark or (isinstance(thread, OwnedThread) and thread.owner is self)

    @property
    def hosted(self) -> bool:
        """True if async handlers run in the host's event loop."""
        return isinstance(self._loop, HostLoop)

    @property
    def ended(self) -> bool:
        """True if the host's event loop has ended, and this bus is not closed."""
        return self.hosted and self._loop.ended and not self._closing

    @property
    def in_host_loop(self) -> bool:
        """True on the thread of the host's event loop, which no call may block."""
        return isinstance(self._loop, HostLoop) and self._loop.here

    def drain(self, deadline: Deadline) -> DrainReport:
        """Wait until all events published before this call are delivered, dropped or failed."""
        for lane in _lanes(self._serving()):
            lane.join(deadline)
        return self.report()

    def drain_until_quiet(self, deadline: Deadline) -> bool:
        """Drain until no event was published meanwhile, so that events of the last handlers are delivered, too."""
        before = None
        if self.ended:
            self._lose_tasks()
        while True:
            self.drain(deadline)
            now = self.report()
            # Lanes are read one after the other, and events can be published to the first while the last is read: all is
            # quiet when two reports in a row are the same and have nothing pending.
            if not now.pending and now == before:
                return True
            if not deadline.left:
                return False
            before = now

    def report(self) -> DrainReport:
        """Sum of the counts of all lanes since the bus opened."""
        with self._lock:
            return sum((one.stats.since(one.before) for one in list(self._consumers)), self._past)

    def close(self, grace: float, reason: str, *, abandon: bool) -> dict[str, int]:
        """Close all lanes, end the consumers, and return how many events were left undelivered, by lane.

        Those of handlers whose failures are only logged are logged here.

        Args:
            grace: seconds to wait for consumers; consumers that do not end are abandoned.
            reason: the error text for publishers that come too late.
            abandon: drop all pending events; else events since :meth:`drain_until_quiet` are delivered first.
        """
        if self.ended:
            self._lose_tasks()
        self._closing = True
        consumers = self._serving()
        for lane in _lanes(consumers):
            lane.close(reason)
        deadline = Deadline(grace)
        if not abandon:
            for lane in _lanes(consumers):
                lane.join(deadline)
        deliveries = [delivery for consumer in consumers for delivery in consumer.deliveries]
        left, quiet = (
            {one.lane.label: pending for one in deliveries if one.loud is loud and (pending := one.lane.stats.pending)}
            for loud in (True, False)
        )
        if quiet:
            advice = "give Bus a longer drain_timeout=, or reduce the work of these handlers"
            log.error(
                "events were not delivered before the bus closed", id="events-left-by-handlers", events=quiet, advice=advice
            )
        for consumer in consumers:
            consumer.abandon(now=abandon)
        behind = [one.label for one in consumers if isinstance(one, ThreadConsumer) and not one.ended(deadline.left)]
        if not self._loop.stop(max(CANCEL_GRACE, deadline.left)):  # threads that hang may have left no time
            tasks = [one.label for one in consumers if isinstance(one, TaskConsumer) and not one.ended()]
            behind += [f"{label}, which continues after it was cancelled" for label in tasks] or [self._loop.name]
        # Also consumers woken by a late publisher: its wake-up sees that the loop stops, or is seen here.
        for lane in _lanes({*consumers, *self._serving()}):
            lane.detach()
        if behind:
            log.warning("offloaded handlers did not end and were abandoned", id="handlers-abandoned", handlers=behind)
        return left

    def _wake(self, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.add(consumer)  # it may have ended; a drain must know of it before it starts again
        consumer.wake()
        if self._closing and self._loop.stopping:  # nothing may be left to wake
            for lane in _lanes([consumer]):
                lane.detach()
        elif isinstance(consumer, TaskConsumer) and self.ended:
            self._lose(consumer)

    def _tasks(self) -> list[TaskConsumer]:
        with self._lock:
            return [one for one in self._consumers if isinstance(one, TaskConsumer)]

    def _tasks_pending(self) -> bool:
        return any(one.stats.pending for one in self._tasks())

    def _lose_tasks(self) -> None:
        for one in self._tasks():
            self._lose(one)

    def _lose(self, consumer: TaskConsumer) -> None:
        """Count the events of a task as dropped: the event loop ends, or has ended, and the bus was not closed."""
        if consumer.lost:
            return
        before = {one.lane: one.lane.stats for one in consumer.deliveries}
        consumer.lose(ENDED)
        for lane, stats in before.items():
            if stats.pending:
                self.lost[lane.label] += stats.pending

    def _must_not_wait(self) -> bool:
        """True where waiting for a slot in a lane could be a deadlock."""
        self._interrupt()
        return self.inside or self.in_host_loop

    def _serving(self) -> list[Consumer]:
        """Return the consumers that have not ended, and forget the others."""
        with self._lock:
            for one in list(self._consumers):
                # In this order. A publish under way has a slot and so the lane is not finished; or it has none yet, and wakes
                # the consumer later, which adds it again.
                if one.finished() and not (now := one.stats).pending and one.ended():
                    self._past += now.since(one.before)
                    one.before = now
                    self._consumers.discard(one)
            return list(self._consumers)


def _lanes(consumers: Iterable[Consumer]) -> list[Lane]:
    return [delivery.lane for consumer in consumers for delivery in consumer.deliveries]


def _checked(delivery: Delivery) -> Delivery:
    """Return a delivery whose handler, in this process, refuses to take part in collectives."""
    if delivery.in_process:
        return delivery
    handler = refuses_collectives(delivery.handler, delivery.lane.label, is_async=delivery.is_async)
    return msgspec.structs.replace(delivery, handler=handler)
