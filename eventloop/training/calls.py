"""The calls of a ``TrainLoop``: one of ``run``, ``arun``, ``validate`` or ``test`` at a time, of all threads and tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING

from trainbus.eventloop.errors import TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.notebook import in_notebook
from trainbus.eventloop.offload import threadsafe_call
from trainbus.eventloop.user_errors import contextmanager

if TYPE_CHECKING:
    from trainbus.eventloop.training.run import Run

_NOW = "now"

log = get_logger()


class LoopCall:
    """One call: its run, once that is made, and what was asked of it before."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.cancelled = False
        self._asked: deque[Callable[[Run], object]] = deque()

    def begin(self, run: Run) -> None:
        """Note the run, and ask it what it was asked before it was made."""
        self.run = run  # ask() does the two in the other order, so one of them sees the other
        self._pass_on(run)

    def ask(self, request: Callable[[Run], object]) -> None:
        """Pass a request to the run, also one that is made later; from any thread and from signal handlers."""
        self._asked.append(request)
        if (run := self.run) is not None:
            self._pass_on(run)

    def cancel(self) -> None:
        """Cancel the run, also one that is made later; from any thread."""
        self.cancelled = True
        self.ask(methodcaller("cancel"))

    def _pass_on(self, run: Run) -> None:
        with suppress(IndexError):  # another thread, or a signal handler, may pass on the same ones meanwhile
            while True:
                self._asked.popleft()(run)


class LoopCalls:
    """The call in progress, if there is one."""

    def __init__(self) -> None:
        self._calls: dict[str, LoopCall] = {}

    @property
    def run(self) -> Run | None:
        """The run of the call in progress."""
        call = self._calls.get(_NOW)
        return None if call is None else call.run

    def ask(self, name: str, *arguments: object) -> None:
        """Call a method of the run or of a part of it; raise TrainingError if no call is in progress."""
        call = self._calls.get(_NOW)
        if call is None:
            raise TrainingError(
                f"loop.{name.rpartition('.')[2]}() needs a run, and this loop is not running: call it while loop.run() or "
                f"loop.arun() is under way, or call event.run.{name}() in a handler of before_run"
            )
        call.ask(lambda run: attrgetter(name)(run)(*arguments))

    @contextmanager
    def exclusive(self) -> Iterator[LoopCall]:
        """Make a call; raise TrainingError if another one is in progress."""
        call = LoopCall()
        try:
            if self._calls.setdefault(_NOW, call) is not call:  # one step, whichever threads call
                raise TrainingError(
                    "this TrainLoop is already running: for a second run, create another TrainLoop with its own bus and hooks"
                )
            yield call
        finally:
            if self._calls.get(_NOW) is call:
                del self._calls[_NOW]


def tell_if_it_blocks() -> None:
    """Log once in a process that a training blocks this thread's event loop.

    Not in a notebook: its kernel runs each cell in an event loop, which has nothing else to do.
    """
    try:
        threadsafe_call()
    except RuntimeError:  # no event loop runs here
        return
    if not in_notebook():
        _tell()


@cache
def _tell() -> None:
    log.warning(
        "loop.run() blocks the event loop of this thread, and its other tasks wait for the end; in async code, use "
        "`await loop.arun()`",
        id="event-loop-blocked",
    )
