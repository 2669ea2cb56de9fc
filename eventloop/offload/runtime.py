"""Where the consumers of a bus run: threads of its own for blocking handlers, one event loop for async ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

from eventloop.log import get_logger
from eventloop.offload.consumer import Consumer, Delivery
from eventloop.offload.contexts import handling
from eventloop.offload.deadline import Deadline
from eventloop.offload.loops import CANCEL_GRACE, Backend, HostLoop, LoopThread, ended
from eventloop.offload.reports import DrainReport, since, total
from eventloop.offload.task_consumer import TaskConsumer
from eventloop.offload.thread_consumer import ThreadConsumer
from eventloop.offload.worker import MakeThread, Worker

log = get_logger()


class Runtime:
    """The open half of a bus: made when it opens, thrown away when it has closed.

    Args:
        loop: for async handlers: the host's, or which kind the bus runs on a thread of its own.
        interrupt: called on a thread that is about to wait for a place in a lane; may raise instead.
    """

    def __init__(self, loop: HostLoop | Backend = "asyncio", interrupt: Callable[[], object] = lambda: None) -> None:
        self.hosted = isinstance(loop, HostLoop)
        self._loop = loop if isinstance(loop, HostLoop) else LoopThread(loop, self._loop_thread)
        self._interrupt = interrupt
        self._mark = object()
        self._consumers: set[Consumer] = set()
        self._over = False
        self._past = DrainReport()  # of consumers that have ended
        self._lock = threading.Lock()

    def serve_thread(self, delivery: Delivery, worker: Callable[[MakeThread], Worker] | None = None) -> None:
        """Start a thread that delivers to the handler, or has a ``worker`` call it."""
        lane = delivery.lane

        def make_thread(run: Callable[[], None]) -> OwnedThread:
            return OwnedThread(self, run, f"trainbus {lane.label}")

        made = None if worker is None else worker(make_thread)
        consumer = ThreadConsumer(self._told_by(delivery), worker=made, thread=make_thread)
        lane.attach(consumer.ring, self._must_not_wait)
        lane.wake()

    def serve_task(self, delivery: Delivery, timeout: float | None = None) -> None:
        """Start a task in the event loop that delivers to an async handler, each call of which may take ``timeout`` seconds."""
        self._loop.start()
        lane = delivery.lane
        consumer = TaskConsumer(self._told_by(delivery), timeout=timeout, mark=self._mark, spawn=self._loop.spawn)

        def wake() -> None:
            # Not only once the loop gets to it, also when a task that has ended starts again: a drain must know of it.
            self._began(consumer)
            self._loop.call_soon(consumer.ring)
            if self._over:  # the loop may have ended before it got to it, and then nobody will
                lane.detach()

        lane.attach(wake, self._must_not_wait)
        lane.wake()

    @property
    def inside(self) -> bool:
        """True in an offloaded handler, which would wait for itself if it waited for the bus."""
        thread = threading.current_thread()
        return handling.get() is self._mark or (isinstance(thread, OwnedThread) and thread.owner is self)

    @property
    def in_host_loop(self) -> bool:
        """True on the thread of the host's event loop, which nothing may block."""
        return self.hosted and self._loop.here

    def drain(self, deadline: Deadline) -> DrainReport:
        """Wait until all that was published before this call is delivered, dropped or failed."""
        for consumer in self._serving():
            consumer.lane.join(deadline)
        return self.report()

    def settle(self, deadline: Deadline) -> bool:
        """Drain until nothing new was published meanwhile (what the last handlers published is delivered too)."""
        before = None
        while True:
            self.drain(deadline)
            now = self.report()
            # Lanes are read one after the other, and what is read first can be published to while the rest is read: it is
            # quiet when two reports in a row are the same and have nothing pending.
            if not now.pending and now == before:
                return True
            if not deadline.left:
                return False
            before = now

    def report(self) -> DrainReport:
        """Sum of the counts of all lanes since the bus opened."""
        with self._lock:
            return total([self._past, *(since(one.before, one.lane.stats) for one in self._consumers)])

    def close(self, grace: float, reason: str, *, abandon: bool) -> dict[str, int]:
        """Close all lanes, end the consumers, and return how many events were left undelivered, by lane.

        Those of handlers whose failures are only logged are logged here.

        Args:
            grace: seconds to wait for consumers; those that do not end are left behind.
            reason: for publishers that come too late.
            abandon: deliver nothing more; else what slipped in since :meth:`settle` is delivered first.
        """
        consumers = self._serving()
        for consumer in consumers:
            consumer.lane.close(reason)
        deadline = Deadline(grace)
        if not abandon:
            for consumer in consumers:
                consumer.lane.join(deadline)
        left, quiet = (
            {one.lane.label: pending for one in consumers if one.loud is loud and (pending := one.lane.stats.pending)}
            for loud in (True, False)
        )
        if quiet:
            log.warning("events were not delivered before the bus closed", events=quiet)
        for consumer in consumers:
            consumer.abandon(now=abandon)
        threads = [(one.lane.label, one.thread) for one in consumers if isinstance(one, ThreadConsumer)]
        behind = [label for label, thread in threads if thread is not None and not ended(thread, deadline.left)]
        if not self._loop.stop(max(CANCEL_GRACE, deadline.left)):  # threads that hang may have left no time
            tasks = [one.lane.label for one in consumers if isinstance(one, TaskConsumer) and one.alive]
            behind += [f"{label}, which goes on after it was cancelled" for label in tasks] or [self._loop.name]
        self._over = True
        # Those that a late publisher has woken, too: it sees that it is over, or is seen here.
        for consumer in {*consumers, *self._serving()}:
            consumer.lane.detach()
        if behind:
            log.warning("offloaded handlers did not end and were left behind", handlers=behind)
        return left

    def _must_not_wait(self) -> bool:
        """True where waiting for a place in a lane could be a deadlock."""
        self._interrupt()
        return self.inside or self.in_host_loop

    def _loop_thread(self, run: Callable[[], None]) -> OwnedThread:
        return OwnedThread(self, run, "trainbus event loop")

    def _told_by(self, delivery: Delivery) -> Delivery:
        return delivery._replace(began=self._began, ended=self._ended)

    def _serving(self) -> list[Consumer]:
        with self._lock:
            return list(self._consumers)

    def _began(self, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.add(consumer)

    def _ended(self, consumer: Consumer) -> None:
        with self._lock:
            now = consumer.lane.stats
            if now.pending:
                return  # came just now, by a publish that was under way: its publisher rings, and so does every drain
            self._past = total([self._past, since(consumer.before, now)])
            consumer.before = now
            self._consumers.discard(consumer)


class OwnedThread(threading.Thread):
    """A daemon thread of a runtime."""

    def __init__(self, owner: Runtime, run: Callable[[], None], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.owner = owner
