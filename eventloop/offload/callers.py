"""Call blocking handlers for the thread of their lanes: on that thread, or on a second thread that can be abandoned."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from trainbus.eventloop.checks import check_returned
from trainbus.eventloop.errors import HandlerTimeoutError
from trainbus.eventloop.offload.delivery import Delivery

T = TypeVar("T")


class OwnedThread(threading.Thread):
    """A daemon thread of the runtime ``owner``. An abandoned worker thread of anyio would block the interpreter's exit."""

    def __init__(self, owner: object, run: Callable[[], None], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.owner = owner


class Caller:
    """Call blocking handlers for the thread of their lanes: on it, or all on a second one if one of them has a timeout.

    No thread can be killed from outside. The second thread is abandoned when a call takes too long. It ends with the handler,
    whose outcome is ignored.
    """

    def __init__(self, label: str, deliveries: Sequence[Delivery], owner: object = None) -> None:
        self._label = label
        self._has_timeout = any(one.timeout is not None for one in deliveries)
        self._owner = owner
        self._calls: SimpleQueue[_Call | None] | None = None

    def call(self, delivery: Delivery, what: Any) -> None:
        """Call the handler, in the context variables of this thread, and wait for it.

        Raises:
            HandlerTimeoutError: it took too long and was abandoned or killed; the next call uses another thread or process.
            WorkerDiedError: its process has ended; the next call starts another.
            BaseException: the error of the handler.
        """
        leave_library()
        if not self._has_timeout:
            _call(delivery.handler, what)
            return
        if self._calls is None:
            calls: SimpleQueue[_Call | None] = SimpleQueue()
            OwnedThread(self._owner, partial(_make_calls, calls), f"trainbus {self._label}").start()
            self._calls = calls
        outcome: Future[object] = Future()
        self._calls.put((outcome, partial(contextvars.copy_context().run, _call, delivery.handler, what)))
        try:
            error = outcome.exception(delivery.timeout)
        except TimeoutError:
            self.stop()
            raise HandlerTimeoutError(timed_out(delivery, "its thread was abandoned")) from None
        if error is not None:
            try:
                raise error
            finally:
                del error, outcome  # no cycle of the error, its traceback and this frame

    def interrupt(self, *, now: bool) -> None:
        """End a call in progress if that is possible, and refuse further ones; from another thread.

        With ``now`` do not wait for an orderly end of an idle worker either.
        """

    def stop(self) -> None:
        """End the second thread or the worker after its call in progress."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def leave_library() -> None:
    """Have ``sniffio``, which anyio asks, find no event loop in this thread, whose context was copied from code in one."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)


def timed_out(delivery: Delivery, what: str) -> str:
    """Return the message for a handler that took too long."""
    return f"{delivery.lane.label} took longer than its timeout={delivery.timeout:g} s; {what}"


def _call(handler: Callable[[Any], object], what: Any) -> None:
    check_returned(handler(what))


_Call = tuple[Future[object], Callable[[], object]]


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        note_outcome(*call)
        del call  # nothing of it is kept until the next


def note_outcome(outcome: Future[T], call: Callable[[], T]) -> None:
    """Make a call, and note its result or its exception."""
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the outcome is awaited
        outcome.set_exception(error)
