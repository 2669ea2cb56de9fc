"""The consumers of lanes: one daemon thread for a blocking handler, one task for an async one, or one for those of a hook.

Both take the items of their lanes and deliver them, look again after ``linger``, and sleep after an empty look. They end when
the lanes are closed or retired and empty. A ring starts them again for an event that was published just before.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from functools import partial
from itertools import zip_longest
from typing import Any

import anyio
import anyio.lowlevel

from trainbus.eventloop.checks import check_returned
from trainbus.eventloop.errors import HandlerTimeoutError, OffloadError
from trainbus.eventloop.events import Event
from trainbus.eventloop.offload.callers import Caller, OwnedThread, timed_out
from trainbus.eventloop.offload.delivery import Delivery, Sources
from trainbus.eventloop.offload.drain import DrainReport
from trainbus.eventloop.offload.lane import LOOK, Lane
from trainbus.eventloop.offload.loops import Loop, await_through, forgive, handling, in_trio, set_library
from trainbus.eventloop.offload.ordered import OrderedLanes
from trainbus.eventloop.offload.snapshot import Snapshot
from trainbus.eventloop.user_errors import described

_COPY_POLL = 0.0005  # seconds between looks at a copy from a GPU, or at another lane; waiting for it would block the loop


class _Consumer:
    """Take the items of lanes, and count the outcome of each."""

    def __init__(self, label: str, deliveries: Sequence[Delivery], lanes: Lane | OrderedLanes) -> None:
        self.label = label
        self.deliveries = deliveries
        self.before = self.stats
        """The counts of the lanes before this bus session, or when last reported."""
        self._lanes = lanes
        self._by_lane = {one.lane: one for one in deliveries}
        self._abandoned = self._silent = self._lost = False
        self._ended_at: Sources = []
        # Of the items that were taken last:
        self.delivery = deliveries[0]
        self._held = 0  # those that are not accounted for yet

    @property
    def stats(self) -> DrainReport:
        """The sum of the counts of the lanes."""
        return sum((one.lane.stats for one in self.deliveries), DrainReport())

    def finished(self) -> bool:
        """Return True if all lanes are ending and empty."""
        return self._lanes.finished()

    def abandon(self, *, now: bool) -> None:
        """Deliver nothing more after the item in progress; ``now``: the bus waits no longer."""
        self._abandoned = True

    def lose(self, reason: str) -> None:
        """Count all events as dropped, and refuse others for this ``reason``: what would deliver them is gone."""
        self._drop_held()
        self._abandoned = self._lost = True
        for one in self.deliveries:
            one.lane.detach(reason)

    def _take(self) -> list[Any]:
        """Take the oldest items: of one lane, in an uninterrupted row. The delivery is theirs."""
        below: int | None = None
        if isinstance(self._lanes, OrderedLanes):
            if (oldest := self._lanes.oldest()) is None:
                return []
            lane, below = oldest
            self.delivery = self._by_lane[lane]
        lane = self.delivery.lane
        items = lane.take(self.delivery.batch or lane.chunk, below)
        self._held = len(items)
        if lane.given_up:
            self._drop_held()
            return []
        return items

    def _calls(self, items: list[Any]) -> list[tuple[Context, list[Any]]]:
        """Split items into calls of the handler: the context variables of each call, and its items."""
        lane, batch = self.delivery.lane, self.delivery.batch
        if lane.contextual or (lane.number is not None and batch is None):
            return [(item[0], [item[1]]) for item in items]
        values = lane.values(items)
        if batch is not None:
            return [(lane.context.copy(), values)]
        return [(lane.context.copy(), [value]) for value in values]

    def _fail(self, error: BaseException, items: list[Any], arrived: list[Any]) -> None:
        if self._lost:
            return  # counted
        sources = _sources(items, arrived)
        if isinstance(error, Exception):
            if not self._silent:
                # Before it is counted: a drain that saw the count must find the error.
                self.delivery.failed(error, sources)
        else:
            self._ended_at = sources
        self._held -= len(items)
        self.delivery.lane.count(failed=len(items))

    def _break(self, error: BaseException) -> None:
        self._drop_held()
        self.delivery.broken(error, self._ended_at)
        for one in self.deliveries:
            one.lane.close(f"its consumer has ended: {described(error)}")
            one.lane.detach()

    def _drop_held(self) -> None:
        self.delivery.lane.count(dropped=self._held)
        self._held = 0


def _sources(items: list[Any], arrived: list[Any]) -> Sources:
    """Return the events of ``items`` of a lane; ``arrived`` holds the items that have arrived."""
    found: Sources = []
    for item, value in zip_longest(items, arrived):
        if isinstance(item, Snapshot) and item.source is not None:
            found.append(item.source)
        elif isinstance(value, Event):
            found.append((type(value), getattr(value, "progress", None)))
    return found


# ------------------------------------------------------------------------------------------------------------ threads


class ThreadConsumer(_Consumer):
    """Deliver the items of lanes to blocking handlers on a separate thread."""

    def __init__(
        self, label: str, deliveries: Sequence[Delivery], lanes: Lane | OrderedLanes, caller: Caller, owner: object
    ) -> None:
        super().__init__(label, deliveries, lanes)
        self._bell = threading.Lock()  # taken: asleep until a ring releases it; a raw lock cannot be left half set
        self._bell.acquire()
        self._starting = threading.RLock()  # re-entrant for the handlers of signals, which may publish and cancel
        self._caller = caller
        self._owner = owner
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Wake the thread, or start it if it has not begun, or has ended."""
        with self._starting:
            if self._thread is None and not self._abandoned:
                self._start()
        try:
            self._bell.release()
        except RuntimeError:  # "release unlocked lock": already rung
            return

    def abandon(self, *, now: bool) -> None:
        """Deliver nothing more after the item in progress, which a worker process does not finish."""
        super().abandon(now=now)
        self._silent = True  # the bus has closed and says so
        self._caller.interrupt(now=now)
        self.wake()

    def ended(self, grace: float = 0.0) -> bool:
        """Wait for the thread; return True if it has ended."""
        thread = self._thread
        if thread is not None and grace:
            thread.join(grace)
        return thread is None or not thread.is_alive()

    def _start(self) -> None:
        thread = OwnedThread(self._owner, self._run, f"trainbus {self.label}")
        thread.start()
        # After start(), which waits in Python code until the thread runs: where Ctrl-C strikes in there, the thread may run all
        # the same, but not as ours.
        self._thread = thread

    def _run(self) -> None:
        with self._starting:
            if self._thread is not threading.current_thread():
                return
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler, a logger that raises: reported, and nothing hangs
            try:
                self._break(error)
            finally:
                self._caller.stop()

    def _serve(self) -> None:
        lingered = False
        while not self._abandoned:
            if items := self._take():
                lingered = False
                self._deliver(items)
            elif not lingered and self._lanes.linger and not self._lanes.ending:
                lingered = True
                self._lanes.begin_lingering()
                self._bell.acquire(timeout=self._lanes.linger)
            elif self._lanes.disarm():
                if self._finish():
                    return
                lingered = not self._bell.acquire(timeout=LOOK.value)
        self._drop_held()
        self._caller.stop()

    def _finish(self) -> bool:
        if not self.finished():
            return False  # if that changes now, this thread is rung
        # While the bus, as it closes, still waits for this thread. A call for an event that comes meanwhile starts it again.
        self._caller.stop()
        with self._starting:
            if not self.finished():
                return False
            self._thread = None  # a ring from now on starts another
            return True

    def _deliver(self, taken: list[Any]) -> None:
        lane, caller = self.delivery.lane, partial(self._caller.call, self.delivery)
        call = caller if lane.meter is None else partial(lane.meter.record_call, caller)
        for context, items in self._calls(taken):
            if self._abandoned or lane.given_up:
                self._drop_held()
                return
            arrived: list[Any] = []
            try:
                arrived = [item.resolve() if isinstance(item, Snapshot) else item for item in items]
                context.run(call, arrived[0] if self.delivery.batch is None else arrived)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
                self._fail(error, items, arrived)
            except BaseException as error:
                self._fail(error, items, arrived)
                raise
            else:
                self._held -= len(items)
                lane.count(delivered=len(items))


# -------------------------------------------------------------------------------------------------------------- tasks


class TaskConsumer(_Consumer):
    """Deliver the items of lanes to async handlers in a task of the bus's event loop; cancel a call after its timeout."""

    def __init__(
        self, label: str, deliveries: Sequence[Delivery], lanes: Lane | OrderedLanes, loop: Loop, mark: object
    ) -> None:
        super().__init__(label, deliveries, lanes)
        self._loop = loop
        self._mark = mark  # of the runtime, for code that runs in its handlers
        self._running = False
        self._reader: Reader | None = None

    def wake(self) -> None:
        """Wake the task, or start it if it has not begun, or has ended; from any thread."""
        self._loop.call_soon(self._ring)

    def ended(self, grace: float = 0.0) -> bool:
        """Return True if the task has ended; does not wait."""
        return not self._running

    def _ring(self) -> None:
        """Wake the task, or start it; on the loop's thread. Never raises (trio's rule for callbacks)."""
        if not self._running:
            self._running = True
            self._loop.spawn(self._run)
        elif self._reader is not None:
            self._reader.ring()

    @property
    def lost(self) -> bool:
        """True after :meth:`lose`."""
        return self._lost

    def lose(self, reason: str) -> None:
        """Count all events as dropped; where the loop has ended, its task does nothing more."""
        super().lose(reason)
        if self._loop.ended:
            self._running = False

    async def _run(self) -> None:
        self._reader = Reader(self._lanes)
        try:
            while True:
                try:
                    await self._serve(self._reader)
                    break
                except anyio.get_cancelled_exc_class():
                    if self._abandoned or self._loop.stopping:
                        raise
                    forgive()  # a handler cancelled this task, as its own: between two calls nothing is in hand
        except anyio.get_cancelled_exc_class():
            self._drop_held()
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler, a logger that raises: reported, and nothing hangs
            self._break(error)
        finally:
            # A ring from now on starts another task. There was no await since the lane was seen to be finished.
            self._running = False

    async def _serve(self, reader: Reader) -> None:
        library = "trio" if in_trio() else "asyncio"
        while taken := await reader.next(self._take):
            for context, items in self._calls(taken):
                if self.delivery.lane.given_up:
                    self._drop_held()
                    break
                context.run(handling.set, self._mark)
                set_library(context, library)
                await self._call(context, items)
            await anyio.lowlevel.checkpoint()  # a handler that never waits must not starve the other lanes

    async def _call(self, context: Context, items: list[Any]) -> None:
        arrived: list[Any] = []
        try:
            arrived = [await arrive_async(item) for item in items]
            argument = arrived[0] if self.delivery.batch is None else arrived
            called = await_through(context.run, self.delivery.handler(argument))
            meter = self.delivery.lane.meter
            call = called if meter is None else meter.record_await(called)
            check_returned(await self._limited(call))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
            self._fail(error, items, arrived)
        except anyio.get_cancelled_exc_class() as error:
            if self._abandoned or self._loop.stopping:
                raise
            # asyncio: the handler awaited a future or task that other code cancelled. Not meant for the consumer.
            forgive()
            stray = OffloadError("the handler awaited a cancelled task or future; catch CancelledError where it is awaited")
            stray.__cause__ = error
            self._fail(stray, items, arrived)
        except BaseException as error:
            self._fail(error, items, arrived)
            raise
        else:
            if not self._lost:
                self._held -= len(items)
                self.delivery.lane.count(delivered=len(items))

    async def _limited(self, called: Awaitable[object]) -> object:
        timeout = self.delivery.timeout
        if timeout is None:
            return await called
        with anyio.move_on_after(timeout):
            return await called
        raise HandlerTimeoutError(timed_out(self.delivery, "it was cancelled"))


Consumer = ThreadConsumer | TaskConsumer


class Reader:
    """Wait in an event loop for the items of a lane, or of several."""

    def __init__(self, lane: Lane | OrderedLanes) -> None:
        self._lane = lane
        self._bell = anyio.Event()

    def ring(self) -> None:
        """Have :meth:`next` look again; on the loop's thread."""
        self._bell.set()

    async def next(self, take: Callable[[], list[Any]]) -> list[Any]:
        """Return what ``take`` finds in the lane, waiting for it; nothing once the lane is finished."""
        lingered = False
        while True:
            self._bell = anyio.Event()  # made before looking, so that a ring between the look and the wait is kept
            if items := take():
                return items
            if not lingered and self._lane.linger and not self._lane.ending:
                lingered = True
                self._lane.begin_lingering()
                with anyio.move_on_after(self._lane.linger):
                    await self._bell.wait()
            elif self._lane.disarm():
                if self._lane.finished():
                    return []
                with anyio.move_on_after(LOOK.value) as slept:
                    await self._bell.wait()
                lingered = slept.cancelled_caught


async def arrive_async(item: Any) -> Any:
    """Return the value of an item of a lane, after waiting for what it waits for without blocking the event loop."""
    if not isinstance(item, Snapshot):
        return item
    while not all(one.query() for one in item.pending):  # noqa: ASYNC110 - a GPU and a lane set no event of the loop
        await anyio.sleep(_COPY_POLL)
    return item.resolve()
