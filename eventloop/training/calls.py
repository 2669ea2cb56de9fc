"""The call of ``TrainLoop.run``, ``arun``, ``val`` or ``test`` that is in progress: one at a time, of all threads and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainbus.eventloop.errors import TrainingError
from trainbus.eventloop.user_errors import contextmanager

if TYPE_CHECKING:
    from trainbus.eventloop.training.run import Run

_NOW = "now"


class LoopCall:
    """One call: its run, once that is made, and whether its caller was cancelled."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.cancelled = False

    def begin(self, run: Run) -> None:
        """Note the run, and cancel it if the caller was cancelled before."""
        self.run = run  # cancel() does the two in the other order, so one of them sees the other
        if self.cancelled:
            run.cancel()

    def cancel(self) -> None:
        """Cancel the run, also one that is made later; from any thread."""
        self.cancelled = True
        if (run := self.run) is not None:
            run.cancel()


class LoopCalls:
    """The call in progress, if there is one."""

    def __init__(self) -> None:
        self._calls: dict[str, LoopCall] = {}

    @property
    def run(self) -> Run | None:
        """The run of the call in progress."""
        call = self._calls.get(_NOW)
        return None if call is None else call.run

    @contextmanager
    def one(self) -> Iterator[LoopCall]:
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
