"""Tasks of asyncio that nothing else in the program can find, and so cannot cancel.

Programs end by ``for task in asyncio.all_tasks(): task.cancel()``, and so does ``asyncio.run``. They mean the tasks of the
program. A consumer that they cancel would lose the event that its handler is busy with. It ends when the bus closes, as the
cancelled tasks leave ``async with bus:``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Self

import anyio


def in_trio() -> bool:
    """Return True if the loop that runs here is trio's."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


def hide(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Take a task out of ``asyncio.all_tasks()``; hold a reference, because asyncio has none."""
    # The function that a task calls when it ends: https://docs.python.org/3/library/asyncio-extending.html
    asyncio.tasks._unregister_task(task)
    return task


def forgive() -> None:
    """Undo the cancellations of this task of asyncio, which were not meant for it; does nothing in other loops."""
    task = None if in_trio() else asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


class HiddenTasks:
    """The part of anyio's task groups that a loop needs, with hidden tasks. Their exceptions are not raised."""

    def __init__(self) -> None:
        self.cancel_scope = self
        self._scopes: set[anyio.CancelScope] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task."""
        task = hide(asyncio.get_running_loop().create_task(self._run(function)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel the tasks, again and again, as anyio does."""
        self._cancelled = True
        for scope in self._scopes:
            scope.cancel()

    async def _run(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self._cancelled:
                    scope.cancel()
                await function()
            finally:
                self._scopes.discard(scope)
