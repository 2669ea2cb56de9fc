"""Who calls a blocking handler on behalf of its lane's thread, where that thread must be able to give up on it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, Protocol

from eventloop.errors import HandlerTimeoutError

MakeThread = Callable[[Callable[[], None]], threading.Thread]


class Worker(Protocol):
    """Calls the handler elsewhere, one call at a time."""

    def call(self, what: Any) -> None:
        """Have the handler called with ``what`` and wait for it.

        Raises:
            HandlerTimeoutError: it took too long and was left behind or killed; the next call goes to another.
            WorkerDiedError: its process has ended; the next call starts another.
            BaseException: what the handler raised.
        """

    def interrupt(self, *, now: bool) -> None:
        """Have a call in progress end, if that is possible, and refuse further ones; from another thread.

        With ``now`` do not wait for an orderly end of an idle worker either.
        """

    def stop(self) -> None:
        """End; no call is in progress."""


class ThreadWorker:
    """Calls a handler that has a ``timeout`` on a second thread, which is left behind when it takes longer.

    No thread can be ended from outside. What was left behind ends with its handler, and nobody hears how.

    Args:
        handler: called with what the lane's thread has.
        timeout: seconds per call.
        label: of the subscription, for errors.
        make_thread: makes a thread, not started yet.
    """

    def __init__(self, handler: Callable[[Any], object], timeout: float, label: str, make_thread: MakeThread) -> None:
        self._handler = handler
        self._timeout = timeout
        self._label = label
        self._make_thread = make_thread
        self._hand: _Hand | None = None

    def call(self, what: Any) -> None:
        """Have the handler called, in the context variables of this thread."""
        if self._hand is None:
            self._hand = _Hand(self._make_thread)
        call = _Call(self._handler, what)
        if self._hand.do(call, self._timeout):
            call.check()
            return
        self._hand = None
        raise HandlerTimeoutError(timed_out(self._label, self._timeout, "its thread was left behind"))

    def interrupt(self, *, now: bool) -> None:
        """Do nothing: the handler's thread cannot be ended, and the lane's is left behind as it would be without it."""

    def stop(self) -> None:
        """End the second thread."""
        if self._hand is not None:
            self._hand.end()
            self._hand = None


def timed_out(label: str, timeout: float, what: str) -> str:
    """Return the message for a handler that took too long."""
    return f"{label} took longer than its timeout={timeout:g} s; {what}"


class _Call:
    """A call and how it ended."""

    def __init__(self, handler: Callable[[Any], object], what: Any) -> None:
        self._handler = handler
        self._what = what
        self._context = contextvars.copy_context()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._context.run(self._handler, self._what)
        except BaseException as error:  # noqa: BLE001 - raised on the lane's thread
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None  # no cycle of the error, its traceback and this
            raise error


class _Hand:
    """A thread that makes calls. Raw locks as bells, as in the lane: taken, until the other side releases them."""

    def __init__(self, make_thread: MakeThread) -> None:
        self._asked, self._done = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._done.acquire()
        self._call: _Call | None = None
        self._left = False
        make_thread(self._run).start()

    def do(self, call: _Call, timeout: float) -> bool:
        """Have ``call`` made; False if it took longer than ``timeout``, and this thread must be asked nothing more."""
        self._call = call
        self._asked.release()
        if self._done.acquire(timeout=timeout):
            return True
        # It may be done this instant, and wait to be asked again; to who asked it was too late all the same.
        self._left, self._call = True, None
        if self._asked.locked():
            self._asked.release()
        return False

    def end(self) -> None:
        self._call = None
        self._asked.release()

    def _run(self) -> None:
        while not self._left:
            self._asked.acquire()
            call, self._call = self._call, None
            if call is None:
                return
            call.run()
            del call  # nothing of it is kept until the next
            self._done.release()
