"""Where the consumers of a bus run: threads of its own for blocking handlers, one event loop thread for async ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import anyio
import structlog

from eventloop.errors import BusStateError
from eventloop.offload.consumer import Failed, TaskConsumer, ThreadConsumer
from eventloop.offload.lane import DrainReport, Lane

Backend = Literal["asyncio", "trio"]

log = structlog.get_logger("trainbus")


class Runtime:
    """The open half of a bus: made when it opens, thrown away when it has closed.

    Args:
        backend: of the loop thread; ``"trio"`` needs trio installed.
    """

    def __init__(self, backend: Backend = "asyncio") -> None:
        self._loop = LoopThread(backend)
        self._threads: dict[Lane, ThreadConsumer] = {}
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()

    def serve_thread(self, lane: Lane, handler: Callable[[Any], object], failed: Failed, batch: int | None) -> None:
        """Start a thread that delivers ``lane`` to ``handler``."""
        consumer = ThreadConsumer(lane, handler, failed, batch)
        with self._lock:
            self._threads[lane] = consumer
            self._lanes.append(lane)
        lane.attach(consumer.ring, self.owns_thread)
        consumer.thread.start()

    def serve_task(self, lane: Lane, handler: Callable[[Any], Awaitable[object]], failed: Failed, batch: int | None) -> None:
        """Start a task on the loop thread that delivers ``lane`` to the async ``handler``."""
        self._loop.start()
        consumer = TaskConsumer(lane, handler, failed, batch)
        with self._lock:
            self._lanes.append(lane)
        lane.attach(lambda: self._loop.call_soon(consumer.ring), self.owns_thread)
        self._loop.spawn(consumer.run)

    def owns_thread(self) -> bool:
        """True on a thread that belongs to the bus, where waiting for the bus would be a deadlock."""
        current = threading.current_thread()
        with self._lock:
            return current is self._loop.thread or any(current is consumer.thread for consumer in self._threads.values())

    def drain(self, timeout: float | None) -> DrainReport:
        """Wait until all that was published before this call is delivered, dropped or failed.

        Raises:
            BusStateError: called from a handler of this bus, which would wait for itself.
        """
        if self.owns_thread():
            raise BusStateError("bus.drain() was called from an offloaded handler of the same bus: it would wait for itself")
        deadline = None if timeout is None else time.monotonic() + timeout
        for lane in list(self._lanes):
            lane.join(deadline)
        return self.report()

    def settle(self, timeout: float) -> DrainReport:
        """Drain until nothing new was published meanwhile (what the last handlers published is delivered too)."""
        deadline = time.monotonic() + timeout
        report = self.drain(timeout)
        while report.pending and time.monotonic() < deadline:
            report = self.drain(deadline - time.monotonic())
        return report

    def report(self) -> DrainReport:
        """Sum of the counts of all lanes served so far."""
        stats = [lane.stats for lane in list(self._lanes)]
        return DrainReport(
            delivered=sum(lane.delivered for lane in stats),
            dropped=sum(lane.dropped for lane in stats),
            failed=sum(lane.failed for lane in stats),
            pending=sum(lane.pending for lane in stats),
        )

    def close(self, grace: float, reason: str) -> None:
        """Close all lanes and end the consumers; those that do not end within ``grace`` seconds are left behind.

        What is still queued is not delivered; call :meth:`settle` first for a clean end.
        """
        for lane in self._lanes:
            lane.close(reason)
        for consumer in self._threads.values():
            consumer.abandon()
        deadline = time.monotonic() + grace
        left = [consumer.thread for consumer in self._threads.values() if not _ended(consumer.thread, deadline)]
        if not self._loop.stop(max(0.0, deadline - time.monotonic())):
            left.append(self._loop.thread)
        for lane in self._lanes:
            lane.detach()
        if left:
            log.warning("offloaded handlers did not end and were left behind", threads=[thread.name for thread in left])


class LoopThread:
    """An event loop on a daemon thread, started when the first async handler needs it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ready = threading.Event()
        self._call_soon: Callable[[Callable[[], object]], object] = _not_running
        self._arrivals: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._bell: anyio.Event
        self._stopping = False
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="trainbus event loop", daemon=True)

    def start(self) -> None:
        """Start the loop if it is not running yet, and wait until it is."""
        if self.thread.ident is None:
            self.thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise BusStateError(f"the {self._backend} event loop did not start: {self._failure}") from self._failure

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback``, which must not raise, on the loop's thread; does not wait for it."""
        self._call_soon(callback)

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start ``task`` in the loop's task group; does not wait for it."""
        self._arrivals.append(task)
        self._call_soon(self._ring)

    def stop(self, grace: float) -> bool:
        """Cancel what still runs and end the loop; False if it did not end within ``grace`` seconds."""
        if not self.thread.is_alive():
            return True
        self._stopping = True
        self._call_soon(self._ring)
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


def _ended(thread: threading.Thread, deadline: float) -> bool:
    if thread is not threading.current_thread():
        thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _not_running(callback: Callable[[], object]) -> None:
    raise BusStateError("the event loop of the bus is not running")
