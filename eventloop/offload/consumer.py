"""The consumers of lanes: one daemon thread for a blocking handler, one task for an async one.

Both do the same: take what is there and deliver it; look again after ``linger``; sleep after an empty look. They end when
their lane is closed and empty.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from eventloop.detach import Staged
from eventloop.offload.lane import Lane

_CHUNK = 64  # items taken at once for a handler that gets them one by one; bounds what a cancellation can lose track of

Failed = Callable[[Exception], None]


class ThreadConsumer:
    """Delivers a lane's items to a blocking handler on a thread of its own.

    A daemon thread of ours, not one of anyio's workers: an abandoned worker would keep the interpreter from exiting.
    """

    def __init__(self, lane: Lane, handler: Callable[[Any], object], failed: Failed, batch: int | None) -> None:
        self._lane = lane
        self._handler = handler
        self._failed = failed
        self._batch = batch
        self._bell = threading.Lock()  # taken: asleep until somebody releases it; a raw lock cannot be left half set
        self._bell.acquire()
        self._abandoned = False
        self.thread = threading.Thread(target=self._run, name=f"trainbus {lane.label}", daemon=True)

    def ring(self) -> None:
        """Wake the thread; harmless if it is awake."""
        try:
            self._bell.release()
        except RuntimeError:  # "release unlocked lock": already rung
            return

    def abandon(self) -> None:
        """Deliver nothing more after the item in progress."""
        self._abandoned = True
        self.ring()

    def _run(self) -> None:
        lingered = False
        while not self._abandoned:
            items = self._lane.take(self._batch or _CHUNK)
            if items:
                lingered = False
                self._deliver(items)
            elif not lingered and self._lane.linger and not self._lane.closed:
                lingered = True
                self._bell.acquire(timeout=self._lane.linger)
            elif self._lane.disarm():
                if self._lane.closed:
                    return
                self._bell.acquire()
                lingered = False

    def _deliver(self, items: list[Any]) -> None:
        if self._batch is not None:
            self._call(lambda: self._handler([_arrive(item) for item in items]), len(items))
            return
        for item in items:
            if self._abandoned:
                return
            self._call(lambda item=item: self._handler(_arrive(item)), 1)  # type: ignore[misc]

    def _call(self, call: Callable[[], object], number: int) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
            self._lane.failed(number)
            self._failed(error)
        else:
            self._lane.delivered(number)


class TaskConsumer:
    """Delivers a lane's items to an async handler in a task of the bus's event loop."""

    def __init__(self, lane: Lane, handler: Callable[[Any], Awaitable[object]], failed: Failed, batch: int | None) -> None:
        self._lane = lane
        self._handler = handler
        self._failed = failed
        self._batch = batch
        self._bell: anyio.Event | None = None

    def ring(self) -> None:
        """Wake the task; must be called on the loop's thread and never raises (trio's rule for callbacks)."""
        if self._bell is not None:
            self._bell.set()

    async def run(self) -> None:
        """Serve the lane until it is closed and empty."""
        lingered = False
        while True:
            # Made before looking, so that a ring between the look and the wait is kept.
            self._bell = anyio.Event()
            items = self._lane.take(self._batch or _CHUNK)
            if items:
                lingered = False
                await self._deliver(items)
            elif not lingered and self._lane.linger and not self._lane.closed:
                lingered = True
                with anyio.move_on_after(self._lane.linger):
                    await self._bell.wait()
            elif self._lane.disarm():
                if self._lane.closed:
                    return
                await self._bell.wait()
                lingered = False

    async def _deliver(self, items: list[Any]) -> None:
        if self._batch is not None:
            await self._call([_arrive(item) for item in items], len(items))
            return
        for item in items:
            await self._call(_arrive(item), 1)

    async def _call(self, argument: Any, number: int) -> None:
        try:
            await self._handler(argument)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
            self._lane.failed(number)
            self._failed(error)
        else:
            self._lane.delivered(number)


def _arrive(item: Any) -> Any:
    return item.resolve() if isinstance(item, Staged) else item
