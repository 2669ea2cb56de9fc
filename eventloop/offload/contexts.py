"""Context variables on their way to offloaded handlers, and the mark that says that code runs for one."""

from __future__ import annotations

import sys
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any

handling: ContextVar[object] = ContextVar("trainbus_handling", default=None)
"""Set in async handlers, and in whatever they start: identifies the runtime whose handler it is."""


def enter_loop(context: Context, mark: object, library: str) -> None:
    """Prepare ``context``, a copy of some thread's, for a handler of the runtime ``mark`` in a loop of ``library``."""
    context.run(handling.set, mark)
    set_library(context, library)


def set_library(context: Context, library: str | None) -> None:
    """Have ``sniffio``, which anyio asks, find this event loop in ``context``, whichever it was copied from."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        context.run(sniffio.current_async_library_cvar.set, library)


@types.coroutine
def await_through(take_step: Callable[..., Any], awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
    """Await it with every step made by ``take_step(function, value)``, as in a task of its own, without the price of one.

    With ``Context.run`` for ``take_step`` the awaitable runs in that context.
    """
    coroutine = awaitable if isinstance(awaitable, Coroutine) else _awaited(awaitable)
    step, value = coroutine.send, None
    while True:
        try:
            yielded = take_step(step, value)
        except StopIteration as done:
            return done.value
        try:
            step, value = coroutine.send, (yield yielded)
        except GeneratorExit:
            take_step(coroutine.close)
            raise
        except BaseException as error:  # noqa: BLE001 - a cancellation, say: it is the coroutine's to see
            step, value = coroutine.throw, error


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
