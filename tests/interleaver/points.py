"""Stop an operation at a line of trainbus, or at an await, and have something else happen there."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from types import FrameType
from typing import Any

FOLDERS = (
    "/eventloop/bus/",
    "/eventloop/offload/",
    "/eventloop/measure/",
    "/eventloop/training/loop.py",
    "/eventloop/training/calls.py",
)

Point = tuple[str, int, bool]
"""A file, a line, and whether it is the main thread that comes there."""


class Lines:
    """Trace the lines of trainbus, on all threads that begin meanwhile and on this one.

    Args:
        at: called with each point that is reached for the first time, on its thread.
    """

    def __init__(self, at: Callable[[Point], object]) -> None:
        self._at = at
        self._seen: set[Point] = set()
        self._main = threading.main_thread()

    def __enter__(self) -> None:
        threading.settrace(self._enter_frame)
        sys.settrace(self._enter_frame)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter_frame(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if any(folder in frame.f_code.co_filename for folder in FOLDERS) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            point = frame.f_code.co_filename, frame.f_lineno, threading.current_thread() is self._main
            if point not in self._seen:
                self._seen.add(point)
                self._at(point)
        return self._line


@types.coroutine
def at_await(number: int, action: Callable[[], object], operation: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Await an operation, and call ``action`` where it waits for the n-th time, from 0. Return its result."""
    step, value = operation.send, None
    while True:
        try:
            yielded = step(value)
        except StopIteration as done:
            return done.value
        if number == 0:
            action()
        number -= 1
        try:
            step, value = operation.send, (yield yielded)
        except BaseException as error:  # noqa: BLE001 - a cancellation: the operation's to see
            step, value = operation.throw, error


class Gate:
    """Where an operation has stopped until something else was done, or cannot be done while it stops."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.reached = threading.Event()
        self.done = threading.Event()

    def stop(self) -> None:
        """Let the other go, and wait for it, but not for long: it may wait for what this thread holds."""
        self.reached.set()
        self.done.wait(self._patience)
