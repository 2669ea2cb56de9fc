"""Time the trainer's own callbacks, so that ``bus.costs()`` names a slow one as it names a slow hook.

All of this is in place only while a training runs whose bus has ``timing`` on when it begins.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Final

from trainbus.bridges.copies import replaced
from trainbus.bridges.ignite.privates import HANDLERS
from trainbus.eventloop.training import HostedRun

_CALLBACK: Final = "[Callback]"
_MODULE: Final = "[LightningModule]"


def time_lightning(trainer: Any, run: HostedRun, own: Any) -> None:
    """Time callbacks and ``on_`` methods of the module, whose calls Lightning reports to its profiler.

    ``own`` is our callback, whose handlers are timed by the bus. Without it, Lightning's tuner is running.
    """
    if not run.bus.timing:
        return
    profiler, bus = trainer.profiler, run.bus
    start, stop = profiler.start, profiler.stop
    begun: dict[str, AbstractContextManager[None]] = {}

    def timed_start(action: str) -> None:
        if own in trainer.callbacks and (span := _span(bus, action, own.state_key)) is not None:
            begun[action] = span
            span.__enter__()
        start(action)

    def timed_stop(action: str) -> None:
        stop(action)
        if (span := begun.pop(action, None)) is not None:
            span.__exit__(None, None, None)

    run.defer(replaced(profiler, "start", timed_start))
    run.defer(replaced(profiler, "stop", timed_stop))


def _span(bus: Any, action: str, own: str) -> AbstractContextManager[None] | None:
    """Return the span of what Lightning calls ``[Callback]Name{...}.method``; None for what is not timed."""
    owner, _, method = action.rpartition(".")
    if owner == _CALLBACK + own or not method.startswith("on_") or not owner.startswith((_CALLBACK, _MODULE)):
        return None
    name = owner.partition("]")[2].partition("{")[0].rpartition(".")[2]
    return bus.span(f"{name}.{method}", method=method)  # type: ignore[no-any-return]


def time_transformers(trainer: Any, run: HostedRun) -> None:
    """Time the methods of ``TrainerCallback`` that callbacks override."""
    if not run.bus.timing:
        return
    base = importlib.import_module("transformers").TrainerCallback
    for callback in trainer.callback_handler.callbacks:
        for name in (name for name in vars(base) if name.startswith("on_")):
            if getattr(type(callback), name, None) is not getattr(base, name):
                run.defer(replaced(callback, name, _timed(run, callback, name)))


def _timed(run: HostedRun, callback: Any, name: str) -> Callable[..., Any]:
    bus, inner, label = run.bus, getattr(callback, name), f"{type(callback).__name__}.{name}"

    @wraps(inner)
    def timed(*arguments: Any, **named: Any) -> Any:
        with bus.span(label, method=name):
            return inner(*arguments, **named)

    return timed


def ignite_handlers(engine: Any, bus: Any, fire: Callable[..., None]) -> Callable[..., None]:
    """Return the function that calls an engine's handlers of an event, timed if the bus has ``timing`` on."""
    if not bus.timing:
        return fire

    def timed_fire(event: Any, *arguments: Any, **named: Any) -> None:
        if handlers := getattr(engine, HANDLERS).get(event):
            names = dict.fromkeys(_name(function) for function, *_ in handlers)
            with bus.span(f"{' + '.join(names)}.{event.name}", method=event.name):
                fire(event, *arguments, **named)
        else:
            fire(event, *arguments, **named)

    return timed_fire


def _name(function: Any) -> str:
    """Return the name of a handler of Ignite: a function, a method of an object such as a metric, or such an object."""
    function = inspect.unwrap(function)  # a handler with every= is wrapped
    owner = getattr(function, "__self__", function)
    return str(getattr(owner, "__name__", type(owner).__name__))
