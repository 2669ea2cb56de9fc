"""A subscription as an async iterator, for applications: ``async for event in bus.stream("after_train_iter")``.

The reader takes events from the stream's lane, in its own task and event loop; the bus starts no consumer for it. So a stream
needs no open bus (it may be made before a run begins), and a drain does not wait for its reader.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, Self, TypeVar, cast

import anyio
import anyio.lowlevel

from trainbus.eventloop.bus.subscription import Stats, Subscription
from trainbus.eventloop.errors import BusStateError
from trainbus.eventloop.offload import Lane, Reader, arrive_async, server_ends, threadsafe_call

T_co = TypeVar("T_co", covariant=True)

_LOOK: Final = 0.2
"""Seconds between two looks of a stream whether its server ends, which applications learn when all responses have ended."""


class Stream(Generic[T_co]):
    """The events of a subscription, in the order in which they were published. Made by ``bus.stream(...)``.

    It ends when the bus closes, or when a web server of this process begins to shut down, after the events that were
    published before. ``await stream.aclose()`` or ``async with stream:`` cancels the subscription at once; after a ``break``,
    garbage collection of the stream does.
    """

    def __init__(self, subscription: Subscription, interrupt: Callable[[], object]) -> None:
        self._inbox = inbox = _Inbox(subscription, cast("Lane", subscription.lane), interrupt)
        self._reading = False
        # On the loop, and not at once: the garbage collector may run while this thread holds the lane's lock.
        weakref.finalize(self, inbox.leave_soon).atexit = False

    @property
    def stats(self) -> Stats:
        """The counts at this moment: ``published == delivered + dropped + pending``."""
        return self._inbox.subscription.stats

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        if self._reading:
            raise BusStateError("two tasks read the same stream, and each would miss events; give each task its own stream")
        self._reading = True
        try:
            event: T_co = await self._inbox.next()
        finally:
            self._reading = False
        return event

    async def aclose(self) -> None:
        """Cancel the subscription; what is still queued is dropped. Idempotent."""
        self._inbox.leave()
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._inbox.leave()


class _Inbox:
    """The reader's side of the lane. The bus refers to it and not to the stream, so that the stream can be collected."""

    def __init__(self, subscription: Subscription, lane: Lane, interrupt: Callable[[], object]) -> None:
        self.subscription = subscription
        self._lane = lane
        self._interrupt = interrupt
        self._call_soon = threadsafe_call()
        self._thread = threading.get_ident()
        self._reader = Reader(lane)
        lane.warns = False  # a slow reader loses events by its own policy
        self._left = False
        self._look_at = 0.0
        lane.attach(self._wake, self._must_not_wait)

    async def next(self) -> Any:
        """Return the next event, waiting for it. Raises StopAsyncIteration at the end."""
        await anyio.lowlevel.checkpoint()
        items: list[Any] | None = self._lane.take(1) or None
        self._look()
        while items is None:
            with anyio.move_on_after(_LOOK + self._lane.linger):
                items = await self._reader.next(lambda: self._lane.take(1))
            self._look()
        if not items:
            self.leave()
            raise StopAsyncIteration
        try:
            arrived = await arrive_async(items[0])
        except BaseException:  # cancelled, most likely
            self._lane.count(dropped=1)
            raise
        self._lane.count(delivered=1)
        return arrived

    def _look(self) -> None:
        """End the stream with its server, also one that is never without an event."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK
            if not self._lane.ending and server_ends():
                self.subscription.cancel()  # the events that are queued are still read

    def leave(self) -> None:
        """Cancel the subscription; a publisher that waits for room continues."""
        self._left = True
        self._lane.full = "drop_new"  # before it is retired: a publisher that waits then drops its event, without an error
        self.subscription.cancel()
        self._lane.detach()

    def leave_soon(self) -> None:
        """Leave, on the loop's thread; may be called anywhere."""
        if not self._left:
            self._wake(self.leave)

    def _wake(self, callback: Callable[[], object] | None = None) -> None:
        try:
            self._call_soon(callback or self._reader.ring)
        except RuntimeError:  # the reader's event loop has ended without leaving
            if not self._left:
                self.leave()

    def _must_not_wait(self) -> bool:
        self._interrupt()
        return threading.get_ident() == self._thread
