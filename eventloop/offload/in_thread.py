"""Blocking work on behalf of a task, while its event loop goes on."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from eventloop.offload.contexts import set_library
from eventloop.offload.loops import threadsafe_call

T = TypeVar("T")


async def in_thread(function: Callable[[], T], name: str, *, cancelled: Callable[[], object]) -> T:
    """Call ``function`` on a thread of its own, in the task's context variables, and return what it returns.

    A daemon thread of ours, not one of anyio's workers, of which there is a limited number for the whole program.

    Args:
        function: blocks for as long as it likes.
        name: of the thread.
        cancelled: called in the task when it is cancelled; has ``function`` end soon, which is waited for.

    Raises:
        BaseException: what ``function`` raised, also where the task was cancelled; else its cancellation.
    """
    work = _Work(function)
    call_soon = threadsafe_call()
    over = anyio.Event()

    def run() -> None:
        work.run()
        try:
            call_soon(over.set)
        except RuntimeError:  # the loop has ended and with it the task
            return

    context = contextvars.copy_context()
    set_library(context, None)  # there is no event loop on that thread
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    try:
        await over.wait()
    except BaseException:
        cancelled()
        while not over.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await over.wait()
            except anyio.get_cancelled_exc_class():  # asyncio's own task.cancel(), again: no scope shields from that
                continue
        work.check()
        raise
    return work.result()


class _Work(Generic[T]):
    """A call and how it ended."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised in the task that waits
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None  # no cycle of the error, its traceback and this
            raise error

    def result(self) -> T:
        self.check()
        return self._results[0]
