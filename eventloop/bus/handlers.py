"""Handlers: how one runs, what it is called, where it is written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from eventloop.bus.hook import Hook
from eventloop.callables import is_async, is_generator
from eventloop.errors import SubscribeError

Mode = Literal["inline", "async", "thread", "process", "stream"]


def stream(event: Any) -> None:
    """Stands in for the handler of a stream, whose events are taken by whoever iterates over it."""


def mode_of(handler: Callable[..., Any], offload: str | None) -> Mode:
    """Return where a handler runs.

    Raises:
        SubscribeError: what it is does not go with ``offload``, or it could run nowhere.
    """
    if handler is stream:
        return "stream"
    if is_generator(handler):
        raise SubscribeError("a handler with `yield` in it is a generator: calling it would run nothing; return instead")
    if offload not in (None, "inline", "thread", "process"):
        raise SubscribeError(
            f'offload={offload!r}: blocking work goes to offload="thread" or "process"; async functions are offloaded by '
            "nature; anything else runs inline"
        )
    if not is_async(handler):
        return cast("Mode", offload or "inline")
    if offload == "inline":
        raise SubscribeError(
            "an async function cannot run inline: publishing never awaits. Leave offload= out to run it on the bus's event "
            "loop, or make it a plain function"
        )
    if offload is not None:
        raise SubscribeError(
            f'an async function needs no offload="{offload}": it runs on the bus\'s event loop. Leave offload= out, or make it '
            f"a plain function to run it in a {offload}"
        )
    return "async"


def label_of(handler: object, hook: Hook | None) -> str:
    """Return what a handler is called in tables and errors: ``"watch"``, ``"EMAHook.after_train_iter"``."""
    if not callable(handler):
        return repr(handler)
    name = getattr(_unwrapped(handler), "__name__", type(handler).__name__)
    if hook is not None:
        return f"{hook.label}.{name}"
    return str(name)


def location_of(handler: Callable[..., Any]) -> str:
    """Return the folder, file and line of a handler's code: ``"mine/train.py:12"``."""
    function = _unwrapped(handler)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return "builtin"
    path = Path(code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{code.co_firstlineno}"


def _unwrapped(handler: Any) -> Any:
    if isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.unwrap(getattr(handler, "__func__", handler))
