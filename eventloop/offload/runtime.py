"""Where the consumers of a bus run: threads of its own for blocking handlers, one event loop thread for async ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

import anyio

from eventloop.errors import BusStateError
from eventloop.log import get_logger
from eventloop.offload.consumer import Consumer, TaskConsumer, ThreadConsumer
from eventloop.offload.lane import DrainReport, Lane

Backend = Literal["asyncio", "trio"]

log = get_logger()


class Runtime:
    """The open half of a bus: made when it opens, thrown away when it has closed.

    Args:
        backend: of the loop thread; ``"trio"`` needs trio installed.
    """

    def __init__(self, backend: Backend = "asyncio") -> None:
        self._loop = LoopThread(backend, self)
        self._consumers: set[Consumer] = set()
        self._past = DrainReport()  # of consumers that have ended
        self._lock = threading.Lock()

    def serve_thread(
        self,
        lane: Lane,
        handler: Callable[[Any], object],
        failed: Callable[[Exception], None],
        broken: Callable[[BaseException], None],
        batch: int | None,
    ) -> None:
        """Start a thread that delivers ``lane`` to ``handler``; the rest as in :class:`Consumer`."""
        consumer = ThreadConsumer(
            lane,
            handler,
            failed,
            broken,
            batch,
            thread=lambda run: OwnedThread(self, run, f"trainbus {lane.label}"),
            began=self._began,
            ended=self._ended,
        )
        lane.attach(consumer.ring, self.owns_thread)
        lane.wake()

    def serve_task(
        self,
        lane: Lane,
        handler: Callable[[Any], Awaitable[object]],
        failed: Callable[[Exception], None],
        broken: Callable[[BaseException], None],
        batch: int | None,
    ) -> None:
        """Start a task on the loop thread that delivers ``lane`` to the async ``handler``."""
        self._loop.start()
        consumer = TaskConsumer(
            lane, handler, failed, broken, batch, spawn=self._loop.spawn, began=self._began, ended=self._ended
        )
        self._began(consumer)  # not only once the loop gets to it: a drain must know of it
        lane.attach(lambda: self._loop.call_soon(consumer.ring), self.owns_thread)
        lane.wake()

    def owns_thread(self) -> bool:
        """True on a thread that belongs to the bus, where waiting for the bus would be a deadlock."""
        thread = threading.current_thread()
        return isinstance(thread, OwnedThread) and thread.owner is self

    def drain(self, timeout: float | None) -> DrainReport:
        """Wait until all that was published before this call is delivered, dropped or failed.

        Raises:
            BusStateError: called from a handler of this bus, which would wait for itself.
        """
        if self.owns_thread():
            raise BusStateError("bus.drain() was called from an offloaded handler of the same bus: it would wait for itself")
        deadline = None if timeout is None else time.monotonic() + timeout
        for consumer in self._serving():
            consumer.lane.join(deadline)
        return self.report()

    def settle(self, timeout: float) -> bool:
        """Drain until nothing new was published meanwhile (what the last handlers published is delivered too)."""
        deadline = time.monotonic() + timeout
        before = None
        while True:
            self.drain(max(0.0, deadline - time.monotonic()))
            now = self.report()
            # Lanes are read one after the other, and what is read first can be published to while the rest is read: it is
            # quiet when two reports in a row are the same and have nothing pending.
            if not now.pending and now == before:
                return True
            if time.monotonic() >= deadline:
                return False
            before = now

    def report(self) -> DrainReport:
        """Sum of the counts of all lanes since the bus opened."""
        with self._lock:
            return _sum([self._past, *map(_since, self._consumers)])

    def close(self, grace: float, reason: str, *, abandon: bool) -> dict[str, int]:
        """Close all lanes, end the consumers, and return how many events were left undelivered, by lane.

        Args:
            grace: seconds to wait for consumers; those that do not end are left behind.
            reason: for publishers that come too late.
            abandon: deliver nothing more; else what slipped in since :meth:`settle` is delivered first.
        """
        consumers = self._serving()
        for consumer in consumers:
            consumer.lane.close(reason)
        deadline = time.monotonic() + grace
        if not abandon:
            for consumer in consumers:
                consumer.lane.join(deadline)
        left = {consumer.lane.label: pending for consumer in consumers if (pending := consumer.lane.stats.pending)}
        for consumer in consumers:
            consumer.abandon()
        threads = [consumer.thread for consumer in consumers if isinstance(consumer, ThreadConsumer)]
        behind = [thread.name for thread in threads if thread is not None and not _ended(thread, deadline)]
        if not self._loop.stop(max(0.0, deadline - time.monotonic())):
            behind.append(self._loop.thread.name)
        for consumer in consumers:
            consumer.lane.detach()
        if behind:
            log.warning("offloaded handlers did not end and were left behind", threads=behind)
        return left

    def _serving(self) -> list[Consumer]:
        with self._lock:
            return list(self._consumers)

    def _began(self, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.add(consumer)

    def _ended(self, consumer: Consumer) -> None:
        with self._lock:
            self._past = _sum([self._past, _since(consumer)])
            consumer.before = consumer.lane.stats
            self._consumers.discard(consumer)


class OwnedThread(threading.Thread):
    """A daemon thread of a runtime."""

    def __init__(self, owner: Runtime, run: Callable[[], None], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.owner = owner


class LoopThread:
    """An event loop on a daemon thread, started when the first async handler needs it."""

    def __init__(self, backend: Backend, owner: Runtime) -> None:
        self._backend = backend
        self._ready = threading.Event()
        self._call_soon: Callable[[Callable[[], object]], object] = _not_running
        self._arrivals: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._bell: anyio.Event
        self._stopping = False
        self._failure: BaseException | None = None
        self.thread = OwnedThread(owner, self._run, "trainbus event loop")

    def start(self) -> None:
        """Start the loop if it is not running yet, and wait until it is.

        Raises:
            BusStateError: the loop did not start; trio is not installed, perhaps.
        """
        if self.thread.ident is None:
            self.thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise BusStateError(f"the {self._backend} event loop did not start: {self._failure}") from self._failure

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback``, which must not raise, on the loop's thread; does not wait for it. Ignored once it has ended."""
        try:
            self._call_soon(callback)
        except RuntimeError:  # closed (asyncio), finished (trio): whoever closes it takes care of what is left
            if not self._stopping and self.thread.is_alive():
                raise

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start ``task`` in the loop's task group; called on the loop's thread."""
        self._arrivals.append(task)
        self._bell.set()

    def stop(self, grace: float) -> bool:
        """Cancel what still runs and end the loop; False if it did not end within ``grace`` seconds."""
        if not self.thread.is_alive():
            return True
        self._stopping = True
        self.call_soon(self._ring)
        return _ended(self.thread, time.monotonic() + grace)

    def _ring(self) -> None:
        self._bell.set()

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend=self._backend)
        except BaseException as error:  # noqa: BLE001 - handed to start(), which raises it on the caller's thread
            self._failure = error
            self._ready.set()

    async def _main(self) -> None:
        # Tasks are started from in here: anyio's task groups cannot be used from a bare callback of the loop.
        self._bell = anyio.Event()
        self._call_soon = _threadsafe_call(self._backend)
        self._ready.set()
        async with anyio.create_task_group() as group:
            while not self._stopping:
                while self._arrivals:
                    group.start_soon(self._arrivals.popleft())
                await self._bell.wait()
                self._bell = anyio.Event()
            group.cancel_scope.cancel()


def _threadsafe_call(backend: Backend) -> Callable[[Callable[[], object]], object]:
    """Return the running loop's own way to be called from another thread without waiting (anyio has none)."""
    if backend == "trio":
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe


def _since(consumer: Consumer) -> DrainReport:
    """Return what a consumer's lane has counted since it was last reported."""
    now, before = consumer.lane.stats, consumer.before
    return DrainReport(
        delivered=now.delivered - before.delivered,
        dropped=now.dropped - before.dropped,
        failed=now.failed - before.failed,
        pending=now.pending,
    )


def _sum(reports: Sequence[DrainReport]) -> DrainReport:
    return DrainReport(
        delivered=sum(report.delivered for report in reports),
        dropped=sum(report.dropped for report in reports),
        failed=sum(report.failed for report in reports),
        pending=sum(report.pending for report in reports),
    )


def _ended(thread: threading.Thread, deadline: float) -> bool:
    if thread is not threading.current_thread():
        thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _not_running(callback: Callable[[], object]) -> None:
    raise BusStateError("the event loop of the bus is not running")
