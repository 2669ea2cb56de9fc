"""What can be told of a function before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from eventloop.errors import SubscribeError


def is_async(function: Callable[..., Any]) -> bool:
    """True for coroutine functions, partials of them, and objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_generator(function: Callable[..., Any]) -> bool:
    """True for a function with ``yield`` in it, which runs nothing when it is called."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def check_arity(function: Callable[..., Any], who: str, what: str) -> None:
    """Raise SubscribeError if ``function`` cannot be called with one argument.

    Args:
        function: to be called.
        who: it is, in the error: ``"a handler"``.
        what: it is called with.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: nothing to check
    try:
        signature.bind(None)
    except TypeError:
        raise SubscribeError(f"{who} is called with one argument, {what}; this one takes {signature}") from None


def check_picks(option: str, function: Callable[..., Any], purpose: str) -> None:
    """Raise SubscribeError if ``function`` cannot be called with an event on the publisher's thread, for what it returns.

    Args:
        option: that it was given for: ``"when"``.
        function: to be called.
        purpose: what it returns.
    """
    if is_async(function) or is_generator(function):
        kind = "an async function" if is_async(function) else "a generator (it has `yield` in it)"
        raise SubscribeError(
            f"{option}= is {kind}: it is called while the event is published, where nothing awaits or iterates over what it "
            f"returns; make it a plain function that returns {purpose}"
        )
    check_arity(function, f"{option}=", "the event")
