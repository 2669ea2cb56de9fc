"""The consumer of a lane whose handler is async: a task in an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any

import anyio
import anyio.lowlevel

from eventloop.errors import HandlerTimeoutError, OffloadError
from eventloop.offload.consumer import Consumer, Delivery, arrive, copied
from eventloop.offload.contexts import await_in, enter_loop
from eventloop.offload.loops import in_trio
from eventloop.offload.worker import timed_out


class TaskConsumer(Consumer):
    """Delivers a lane's items to an async handler in a task of the bus's event loop; cancels a call after ``timeout``."""

    def __init__(
        self,
        delivery: Delivery,
        *,
        timeout: float | None,
        mark: object,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        super().__init__(delivery)
        self._timeout = timeout
        self._mark = mark  # of the runtime, for code that runs in its handlers
        self._library = ""
        self._spawn = spawn
        self._running = False
        self.alive = False
        """Whether its task is there, if only because a handler goes on after its cancellation."""
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
        self.alive = True
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
        finally:
            self.alive = False

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
            await self._call(context, values)

    async def _call(self, context: Context, items: list[Any]) -> None:
        arrived: list[Any] = []
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
            self._fail(error, items, arrived)
        except anyio.get_cancelled_exc_class() as error:
            if self._abandoned:
                raise
            # asyncio: the handler awaited a future or task that somebody cancelled. Not meant for the consumer.
            stray = OffloadError("the handler awaited something that was cancelled; catch that where it is awaited")
            stray.__cause__ = error
            self._fail(stray, items, arrived)
        except BaseException:
            self._fail_and_end(items, arrived)
            raise
        else:
            self._done(len(items))

    async def _limited(self, called: Awaitable[object], timeout: float) -> None:  # noqa: ASYNC109 - one that is reported
        with anyio.move_on_after(timeout) as scope:
            await called
        if scope.cancelled_caught:
            raise HandlerTimeoutError(timed_out(self.lane.label, timeout, "it was cancelled"))
