"""Collectives of ``torch.distributed`` are refused in offloaded handlers.

All ranks must call them in one order. An offloaded handler runs at any time, so its collective would meet one of the training
on another rank: all ranks would hang, or mix up their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trainbus.eventloop.errors import OffloadError
from trainbus.eventloop.offload.loops import await_through
from trainbus.eventloop.privates import TorchDispatchMode
from trainbus.eventloop.world import world_size

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def refuses_collectives(handler: Callable[[Any], Any], label: str, *, is_async: bool) -> Callable[[Any], Any]:
    """Return ``handler`` with collectives in it raising OffloadError; unchanged where there is one process.

    So it is for a handler with the attribute ``has_own_group``: all ranks call it with the same events in one order, and it
    has a process group that nobody else uses.

    Every operator that it calls then goes through Python code (some microseconds, off the training thread).
    """
    if getattr(handler, "has_own_group", False) or world_size() == 1:
        return handler

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with _Refusal(label):
            return function(*arguments)

    async def call_async(item: Any) -> Any:
        # Step by step: the refusal must not reach the other tasks of the loop's thread.
        return await await_through(call, handler(item))

    return call_async if is_async else partial(call, handler)


class _Refusal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: unannotated
    """Intercept all operators of its thread, including those of ``torch.distributed``, by whatever call."""

    def __init__(self, label: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: unannotated
        self._label = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            raise OffloadError(
                f"{self._label} is offloaded and calls torch.distributed ({func.__name__.split('.')[0]}): it would meet the "
                "collectives of the training in another order on each rank, and all processes would hang. Make the handler "
                "inline, or reduce in an inline handler and pass the result on (run.publish, capture=)"
            )
        return func(*args, **(kwargs or {}))
