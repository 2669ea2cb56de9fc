"""The consumers of lanes: one daemon thread for a blocking handler, one task for an async one.

Both do the same: take what is there and deliver it; look again after ``linger``; sleep after an empty look. They end when
their lane is closed or retired and empty, and start again when rung for what was published just before.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any

import anyio
import anyio.lowlevel

from eventloop.errors import HandlerTimeoutError, OffloadError
from eventloop.offload.contexts import await_in, enter_loop
from eventloop.offload.lane import Lane, LaneStats
from eventloop.offload.loops import in_trio
from eventloop.offload.worker import Worker, timed_out
from eventloop.staged import Staged

_COPY_POLL = 0.0005  # seconds between looks at a copy from a GPU; waiting for it would block the loop


class Consumer:
    """What both kinds share: counting what they have in hand, and telling how it went.

    Args:
        lane: where items come from.
        handler: gets one item, or with ``batch`` a list of them.
        failed: told of every exception of the handler, before it is counted.
        broken: told of what ended the consumer (``SystemExit`` raised by a handler, say); it delivers nothing any more.
        batch: most items per call.
    """

    def __init__(
        self,
        lane: Lane,
        handler: Callable[[Any], object],
        failed: Callable[[Exception], None],
        broken: Callable[[BaseException], None],
        batch: int | None,
    ) -> None:
        self.lane = lane
        self.before: LaneStats = lane.stats  # what the lane had counted before this bus session, or when last reported
        self._handler = handler
        self._failed = failed
        self._broken = broken
        self._batch = batch
        self._most = batch or lane.chunk
        self._held = 0  # items that were taken and are not accounted for yet

    def abandon(self, *, now: bool) -> None:
        """Deliver nothing more after the item in progress; with ``now`` the bus has no patience left."""
        raise NotImplementedError

    def _take(self) -> list[Any]:
        items = self.lane.take(self._most)
        self._held = len(items)
        if self.lane.given_up:
            self._drop_held()
            return []
        return items

    def _calls(self, items: list[Any]) -> Iterator[tuple[Context, list[Any]]]:
        """Split what was taken into calls of the handler: the context variables it sees, and what it gets."""
        if self._batch is not None:
            yield self.lane.context.copy(), items
            return
        for item in items:
            context, value = item if self.lane.contextual else (self.lane.context.copy(), item)
            yield context, [value]

    def _done(self, number: int) -> None:
        self._held -= number
        self.lane.delivered(number)

    def _count_failed(self, number: int) -> None:
        self._held -= number
        self.lane.failed(number)

    def _fail(self, error: Exception, number: int) -> None:
        # Told before it is counted: a drain that saw the count must find the error.
        self._failed(error)
        self._count_failed(number)

    def _break(self, error: BaseException) -> None:
        self._drop_held()
        self._broken(error)
        self.lane.close(f"its consumer has ended: {type(error).__name__}: {error}")
        self.lane.detach()

    def _drop_held(self) -> None:
        self.lane.dropped(self._held)
        self._held = 0


class ThreadConsumer(Consumer):
    """Delivers a lane's items to a blocking handler on a thread of its own, or through a ``worker`` that calls it elsewhere.

    A daemon thread of ours, not one of anyio's workers: an abandoned worker would keep the interpreter from exiting.
    """

    def __init__(
        self,
        lane: Lane,
        handler: Callable[[Any], object],
        failed: Callable[[Exception], None],
        broken: Callable[[BaseException], None],
        batch: int | None,
        *,
        worker: Worker | None,
        thread: Callable[[Callable[[], None]], threading.Thread],
        began: Callable[[Consumer], None],
        ended: Callable[[Consumer], None],
    ) -> None:
        super().__init__(lane, handler if worker is None else worker.call, failed, broken, batch)
        self._bell = threading.Lock()  # taken: asleep until somebody releases it; a raw lock cannot be left half set
        self._bell.acquire()
        self._abandoned = False
        self._starting = threading.Lock()
        self._worker = worker
        self._make_thread = thread
        self._began = began
        self._ended = ended
        self.thread: threading.Thread | None = None

    def ring(self) -> None:
        """Wake the thread, or start it; harmless if it is awake."""
        with self._starting:
            if self.thread is None and not self._abandoned:
                self._start()
        try:
            self._bell.release()
        except RuntimeError:  # "release unlocked lock": already rung
            return

    def abandon(self, *, now: bool) -> None:
        """Deliver nothing more after the item in progress, which a worker process does not finish."""
        self._abandoned = True
        if self._worker is not None:
            self._worker.interrupt(now=now)
        self.ring()

    def _start(self) -> None:
        self._began(self)
        # Assigned first: Ctrl-C can come while start() waits for a thread that runs already.
        self.thread = self._make_thread(self._run)
        try:
            self.thread.start()
        except RuntimeError:  # "can't start new thread"
            self.thread = None
            self._ended(self)
            raise

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler, a logger that raises: told, never hung
            self._break(error)
            self._stop_worker()

    def _serve(self) -> None:
        lingered = False
        while not self._abandoned:
            if items := self._take():
                lingered = False
                self._deliver(items)
            elif not lingered and self.lane.linger and not self.lane.ending:
                lingered = True
                self._bell.acquire(timeout=self.lane.linger)
            elif self.lane.disarm():
                if self._finish():
                    return
                self._bell.acquire()
                lingered = False
        self._drop_held()
        self._stop_worker()

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _finish(self) -> bool:
        if self.lane.finished():
            # While the bus, as it closes, still waits for this thread. Should another event come, another worker is started.
            self._stop_worker()
        with self._starting:
            if not self.lane.finished():
                return False
            self.thread = None  # who rings from now on starts another
            self._ended(self)
            return True

    def _deliver(self, items: list[Any]) -> None:
        for context, values in self._calls(items):
            if self._abandoned or self.lane.given_up:
                self._drop_held()
                return
            self._call(context, values, len(values))

    def _call(self, context: Context, items: list[Any], number: int) -> None:
        try:
            arrived = [arrive(item) for item in items]
            context.run(self._handler, arrived if self._batch is not None else arrived[0])
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
            if self._abandoned:
                self._count_failed(number)  # the bus has closed and said so; nobody is left to tell
            else:
                self._fail(error, number)
        except BaseException:
            self._count_failed(number)
            raise
        else:
            self._done(number)


class TaskConsumer(Consumer):
    """Delivers a lane's items to an async handler in a task of the bus's event loop; cancels a call after ``timeout``."""

    def __init__(
        self,
        lane: Lane,
        handler: Callable[[Any], Awaitable[object]],
        failed: Callable[[Exception], None],
        broken: Callable[[BaseException], None],
        batch: int | None,
        *,
        timeout: float | None,
        mark: object,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        began: Callable[[Consumer], None],
        ended: Callable[[Consumer], None],
    ) -> None:
        super().__init__(lane, handler, failed, broken, batch)
        self._handler: Callable[[Any], Awaitable[object]]
        self._timeout = timeout
        self._mark = mark  # of the runtime, for code that runs in its handlers
        self._library = ""
        self._spawn = spawn
        self._began = began
        self._ended = ended
        self._running = False
        self._abandoned = False
        self._bell: anyio.Event | None = None

    def ring(self) -> None:
        """Wake the task, or start it; must be called on the loop's thread and never raises (trio's rule for callbacks)."""
        if not self._running:
            self._running = True
            self._began(self)
            self._spawn(self.run)
        elif self._bell is not None:
            self._bell.set()

    def abandon(self, *, now: bool) -> None:
        """Take the news that the loop is about to cancel everything."""
        self._abandoned = True

    async def run(self) -> None:
        """Serve the lane until it is closed or retired and empty."""
        self._library = "trio" if in_trio() else "asyncio"
        try:
            await self._serve()
        except anyio.get_cancelled_exc_class():
            self._drop_held()
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler, a logger that raises: told, never hung
            self._break(error)
        else:
            self._running = False  # who rings from now on starts another; no await since the lane was seen to be finished
            self._ended(self)

    async def _serve(self) -> None:
        lingered = False
        while True:
            # Made before looking, so that a ring between the look and the wait is kept.
            self._bell = anyio.Event()
            if items := self._take():
                lingered = False
                await self._deliver(items)
                await anyio.lowlevel.checkpoint()  # a handler that never waits must not starve the other lanes
            elif not lingered and self.lane.linger and not self.lane.ending:
                lingered = True
                with anyio.move_on_after(self.lane.linger):
                    await self._bell.wait()
            elif self.lane.disarm():
                if self.lane.finished():
                    return
                await self._bell.wait()
                lingered = False

    async def _deliver(self, items: list[Any]) -> None:
        for context, values in self._calls(items):
            if self.lane.given_up:
                self._drop_held()
                return
            enter_loop(context, self._mark, self._library)
            await self._call(context, values, len(values))

    async def _call(self, context: Context, items: list[Any], number: int) -> None:
        try:
            for item in items:
                await copied(item)
            arrived = [arrive(item) for item in items]
            called = await_in(context, self._handler(arrived if self._batch is not None else arrived[0]))
            if self._timeout is None:
                await called
            else:
                await self._limited(called, self._timeout)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
            self._fail(error, number)
        except anyio.get_cancelled_exc_class() as error:
            if self._abandoned:
                raise
            # asyncio: the handler awaited a future or task that somebody cancelled. Not meant for the consumer.
            stray = OffloadError("the handler awaited something that was cancelled; catch that where it is awaited")
            stray.__cause__ = error
            self._fail(stray, number)
        except BaseException:
            self._count_failed(number)
            raise
        else:
            self._done(number)

    async def _limited(self, called: Awaitable[object], timeout: float) -> None:  # noqa: ASYNC109 - one that is reported
        with anyio.move_on_after(timeout) as scope:
            await called
        if scope.cancelled_caught:
            raise HandlerTimeoutError(timed_out(self.lane.label, timeout, "it was cancelled"))


async def copied(item: Any) -> None:
    """Wait until ``item`` has arrived from its device."""
    while isinstance(item, Staged) and not item.ready:  # noqa: ASYNC110 - a GPU sets no event of ours
        await anyio.sleep(_COPY_POLL)


def arrive(item: Any) -> Any:
    """Return what the handler gets of an item of its lane."""
    return item.resolve() if isinstance(item, Staged) else item
