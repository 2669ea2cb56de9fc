"""Module mount points: torch's module hooks, published on the bus while something subscribes to them.

    with bus.watch(model, "encoder.*"):
        bus.on("after_module_forward", lambda event: print(event.module_name, event.outputs.std()))

A submodule has torch hooks only for the events with a subscription, so a watched model without subscribers loses no speed.
Hooks change only when subscriptions change, never while an event is published.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.events import (
    AfterModuleBackward,
    AfterModuleForward,
    BeforeModuleBackward,
    BeforeModuleForward,
    ModuleEvent,
)
from trainbus.eventloop.privates import inner_of, not_compiled
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.user_errors import add_note

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Publish = Callable[[ModuleEvent], object]


class Watch:
    """The handle that ``bus.watch(model, ...)`` returns. ``detach()`` it, or use it as a context manager."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...], detach: Callable[[Watch], object]) -> None:
        found = _matching(model, patterns or ("*",))
        self.names = tuple(found)
        """The qualified names of the watched modules; the model itself is ``""``."""
        self._modules = weakref.WeakValueDictionary(found)
        self._detach = detach

    def detach(self) -> None:
        """Stop publishing events of these modules and remove the hooks from them. Idempotent."""
        self._detach(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


class Taps(weakref.WeakKeyDictionary[nn.Module, dict[tuple[type[ModuleEvent], str], RemovableHandle]]):
    """The torch hooks on the watched modules of a bus, by module. Use it under the lock of the bus."""

    def attach(self, watches: list[Watch], kinds: Collection[type[ModuleEvent]], publish: Publish) -> bool:
        """Attach hooks for events of these classes to the watched modules, and remove all others; return True if some are new.

        A module of several watches goes by its name in the first one, so that its events are published once.
        """
        watched = {module: name for watch in reversed(watches) for name, module in watch._modules.items()}
        added = False
        for module in {**self, **watched}:
            handles = self.setdefault(module, {})
            wanted = {(kind, watched[module]) for kind in kinds if module in watched}
            for gone in handles.keys() - wanted:
                handles.pop(gone).remove()
            for kind, name in wanted - handles.keys():
                handles[kind, name] = KINDS[kind](module, _tap_class()(publish, kind, name))
                added = True
            if not handles:
                del self[module]
        return added


KINDS: dict[type[ModuleEvent], Callable[[nn.Module, Callable[..., None]], RemovableHandle]] = {
    BeforeModuleForward: functools.partial(nn.Module.register_forward_pre_hook, with_kwargs=True),
    AfterModuleForward: functools.partial(nn.Module.register_forward_hook, with_kwargs=True),
    BeforeModuleBackward: nn.Module.register_full_backward_pre_hook,
    AfterModuleBackward: nn.Module.register_full_backward_hook,
}
"""The events that watched modules publish, with torch's way to register their hooks."""


class _Tap:
    """A hook on a module. It returns nothing, so that it changes nothing."""

    def __init__(self, publish: Publish, kind: type[ModuleEvent], name: str) -> None:
        self._publish = publish
        self._kind = kind
        self._name = name

    def __call__(self, module: nn.Module, *values: Any) -> None:
        try:
            # The fields of these events are in the order of torch's arguments.
            fields = zip(self._kind.__struct_fields__, (self._name, module, *values), strict=True)
            self._publish(self._kind(**dict(fields)))
        except Exception as error:
            add_note(error, f"published by the watched module {self._name!r} ({type(module).__name__})")
            raise

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # A copy of the model (deepcopy, pickle, torch.save) is another model, which is not watched.
        return functools.partial, (_ignore,)


def _ignore(*_: object) -> None:
    """Do nothing, on copies of watched modules."""


@functools.cache
def _tap_class() -> type[_Tap]:
    """Return the class of hooks that torch.compile does not trace. Made late: importing the compiler takes a second."""

    class Tap(_Tap):
        __call__ = not_compiled(_Tap.__call__, "a bus publishes events of this module: bus.watch")

    return Tap


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise SubscribeError(f"bus.watch takes a torch.nn.Module and patterns of names, not {model!r}")
    named = dict(_named_modules(model))
    kind = type(model).__name__
    found: dict[nn.Module, str] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SubscribeError(f'bus.watch: {pattern!r} is not a pattern; give names of submodules, such as "encoder.*"')
        names = [name for name in named if fnmatchcase(name, pattern)]
        if not names:
            raise SubscribeError(f"no submodule of {kind} matches {pattern!r}{_advice(pattern, named)}")
        called = [name for name in names if not isinstance(named[name], _CONTAINERS)]
        if not called:
            raise SubscribeError(
                f"{pattern!r} matches only {type(named[names[0]]).__name__} containers of {kind}, which are never called "
                f'themselves, so there would be no events; watch the modules in them: "{names[0]}.*"'
            )
        for name in called:
            found.setdefault(named[name], name)  # a module with two names goes by the first
    return {name: module for module, name in found.items()}


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules by their qualified names, without those that wrappers of other modules add."""
    wrappers: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        plain = ".".join(filter(None, (wrappers.get(parent, ""), last)))
        if name and inner_of(type(model.get_submodule(parent))) == last:
            plain = wrappers.get(parent, "")
        wrappers[name] = plain
        yield plain, module


def _advice(pattern: str, named: dict[str, nn.Module]) -> str:
    names = [name for name in named if name]
    there = f"{', '.join(map(repr, names[:5]))}{', ...' * (len(names) > 5)}"
    return did_you_mean(pattern, names, most=3, cutoff=0.5) or f"; it has {there or 'no submodules'}"
