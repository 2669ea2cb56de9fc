"""Collectives of ``torch.distributed`` are refused in offloaded handlers.

Every rank has to make them in one order. An offloaded handler runs whenever its thread gets to it, so that its collective would
meet one of the training's on another rank: all of them would hang, or mix up their tensors.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from eventloop.errors import OffloadError

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_allowed = threading.local()


def refuses_collectives(handler: Callable[[Any], Any], label: str, *, is_async: bool) -> Callable[[Any], Any]:
    """Return ``handler`` such that a collective in it raises OffloadError; as it is where there is one process.

    Every operator that it calls then takes a look of Python code on its way (some microseconds, off the training thread).
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return handler
    if is_async:
        return functools.partial(_call_async, handler, label)
    return functools.partial(_call, handler, label)


@contextmanager
def collectives_allowed() -> Iterator[None]:
    """Let this thread make collectives, on a process group that no other thread uses."""
    _allowed.yes = True
    try:
        yield
    finally:
        _allowed.yes = False


class _Refusal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: unannotated
    """Sees all operators of its thread, and those of ``torch.distributed`` among them, however they are called."""

    def __init__(self, label: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: unannotated
        self._label = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and not getattr(_allowed, "yes", False):
            raise OffloadError(
                f"{self._label} is offloaded and calls torch.distributed ({func.__name__.split('.')[0]}): it would meet the "
                "collectives of the training in another order on each rank, and all processes would hang. Make the handler "
                "inline, or reduce in an inline handler and hand the result over (run.publish, capture=)"
            )
        return func(*args, **(kwargs or {}))


def _call(handler: Callable[[Any], Any], label: str, item: Any) -> Any:
    with _Refusal(label):
        return handler(item)


async def _call_async(handler: Callable[[Any], Awaitable[Any]], label: str, item: Any) -> Any:
    awaitable = handler(item)
    return await _steps(awaitable if isinstance(awaitable, Coroutine) else _awaited(awaitable), label)


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], label: str) -> Generator[Any, Any, Any]:
    """Take every step of it under the refusal, which must not reach the other tasks of the loop's thread."""
    step, value = coroutine.send, None
    while True:
        try:
            with _Refusal(label):
                yielded = step(value)
        except StopIteration as done:
            return done.value
        try:
            step, value = coroutine.send, (yield yielded)
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - a cancellation, say: it is the coroutine's to see
            step, value = coroutine.throw, error


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
