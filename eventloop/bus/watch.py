"""Module mount points: torch's module hooks, published on the bus while somebody hears them.

    with bus.watch(model, "encoder.*"):
        bus.on("after_module_forward", lambda event: print(event.module_name, event.outputs.std()))

A submodule has hooks for those of the four events that are subscribed to, from the first subscription until the last one is
gone, so a model that is watched and not listened to is as fast as any other. That is decided where subscriptions change, and
never on the way of an event.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from eventloop.errors import SubscribeError
from eventloop.events import (
    AfterModuleBackward,
    AfterModuleForward,
    BeforeModuleBackward,
    BeforeModuleForward,
    Event,
    ModuleEvent,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Publisher(Protocol):
    """A bus, seen from a module."""

    def publish(self, event: Event) -> None:
        """Publish ``event``."""


class Watch:
    """The handle that ``bus.watch(model, ...)`` returns. ``detach()`` it, or use it as a context manager."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...], detach: Callable[[Watch], object]) -> None:
        self._modules = tuple((name, weakref.ref(module)) for name, module in _matching(model, patterns or ("*",)))
        self._detach = detach

    @property
    def names(self) -> tuple[str, ...]:
        """The qualified names of the modules that are watched; that of the model itself is ``""``."""
        return tuple(name for name, _ in self._modules)

    @property
    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules, of those that still exist."""
        return ((name, module) for name, reference in self._modules if (module := reference()) is not None)

    def detach(self) -> None:
        """Publish nothing more of these modules, and leave nothing on them. Idempotent."""
        self._detach(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Watch of {', '.join(map(repr, self.names))}>"


class Watches:
    """All the watches of a bus, and what hangs on which module for them. Used under the lock of its bus.

    A module that several watches name has hooks of the first, so that its events are published once.
    """

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._attached: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._watches or self._attached)

    def add(self, watch: Watch) -> None:
        """Take a watch; what it needs is attached by the next :meth:`attach`."""
        self._watches.append(watch)

    def remove(self, watch: Watch) -> None:
        """Let go of a watch; of one that is gone already nothing happens."""
        if watch in self._watches:
            self._watches.remove(watch)

    def attach(self, kinds: Collection[type[ModuleEvent]], bus: Publisher) -> None:
        """Have hooks for events of these classes on the watched modules, and no others."""
        watched = {module: name for watch in reversed(self._watches) for name, module in watch.modules}
        for module, attached in list(self._attached.items()):
            if watched.get(module) != attached.name:
                attached.keep(())
                del self._attached[module]
            else:
                attached.keep(kinds)
        added = False
        for module, name in watched.items():
            added |= self._attached.setdefault(module, _Attached(name)).add(kinds, module, bus)
        if added:
            # Code that torch.compile has made of a model without hooks does not look whether it has some now.
            torch.compiler.reset()


class _Attached:
    """What hangs on one module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handles: dict[type[ModuleEvent], RemovableHandle] = {}

    def keep(self, kinds: Collection[type[ModuleEvent]]) -> None:
        for kind in self._handles.keys() - set(kinds):
            self._handles.pop(kind).remove()

    def add(self, kinds: Collection[type[ModuleEvent]], module: nn.Module, bus: Publisher) -> bool:
        """Return True if something was not there yet."""
        missing = [kind for kind in kinds if kind not in self._handles]
        for kind in missing:
            self._handles[kind] = KINDS[kind].register(module, _tap()(bus, kind, self.name))
        return bool(missing)


# ----------------------------------------------------------------------------------------------- on the modules


class _Kind(NamedTuple):
    """How torch calls the hook of one event."""

    register: Callable[[nn.Module, Callable[..., None]], RemovableHandle]
    fields: tuple[str, ...]


KINDS: dict[type[ModuleEvent], _Kind] = {
    BeforeModuleForward: _Kind(
        lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True), ("inputs", "kwargs")
    ),
    AfterModuleForward: _Kind(
        lambda module, hook: module.register_forward_hook(hook, with_kwargs=True), ("inputs", "kwargs", "outputs")
    ),
    BeforeModuleBackward: _Kind(lambda module, hook: module.register_full_backward_pre_hook(hook), ("grad_outputs",)),
    AfterModuleBackward: _Kind(lambda module, hook: module.register_full_backward_hook(hook), ("grad_inputs", "grad_outputs")),
}
"""The events that watched modules publish."""


class _Tap:
    """A hook on a module. It returns nothing, so that it changes nothing."""

    def __init__(self, bus: Publisher, kind: type[ModuleEvent], name: str) -> None:
        self._bus = bus
        self._kind = kind
        self._fields = KINDS[kind].fields
        self._name = name

    def __call__(self, module: nn.Module, *values: Any) -> None:
        try:
            fields = dict(zip(self._fields, values, strict=True))
            self._bus.publish(self._kind(module_name=self._name, module=module, **fields))
        except Exception as error:
            error.add_note(f"published by the watched module {self._name!r} ({type(module).__name__})")
            raise

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # A copy of the model (deepcopy, pickle, torch.save) is another model, and nobody watches it.
        return _make_ignore, ()


def _ignore(*_: object) -> None:
    """Hangs on copies of watched modules."""


def _make_ignore() -> Callable[..., None]:
    return _ignore


@cache
def _tap() -> type[_Tap]:
    """Return the class of hooks, fenced off from torch.compile, which must not trace into a bus.

    Made when it is needed first: importing the compiler takes a second.
    """

    class Tap(_Tap):
        __call__ = torch.compiler.disable(  # type: ignore[no-untyped-call]
            _Tap.__call__, reason="a bus publishes events of this module: bus.watch"
        )

    return Tap


# ------------------------------------------------------------------------------------------------------ names


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise SubscribeError(f"bus.watch takes a torch.nn.Module and patterns of names, not {model!r}")
    named = dict(_named_modules(model))
    found: dict[nn.Module, str] = {}
    for pattern in patterns:
        names = [name for name in named if fnmatchcase(name, _checked(pattern))]
        if not names:
            raise SubscribeError(f"no submodule of {_class(model)} matches {pattern!r}{_nearest(pattern, named)}")
        called = [name for name in names if not isinstance(named[name], _CONTAINERS)]
        if not called:
            raise SubscribeError(
                f"{pattern!r} matches only {_class(named[names[0]])} containers of {_class(model)}, which are never called "
                f'themselves, so there would be no events; watch what they hold: "{names[0]}.*"'
            )
        for name in called:
            found.setdefault(named[name], name)  # a module with two names goes by the first
    return [(name, module) for module, name in found.items()]


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules by their qualified names, without those that wrappers of other modules add."""
    wrappers: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        plain = ".".join(filter(None, (wrappers.get(parent, ""), last)))
        if name and (last == "_orig_mod" or (last == "module" and isinstance(model.get_submodule(parent), _PARALLEL))):
            plain = wrappers.get(parent, "")
        wrappers[name] = plain
        yield plain, module


def _checked(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise SubscribeError(f'bus.watch: {pattern!r} is not a pattern; give names of submodules, such as "encoder.*"')
    return pattern


def _nearest(pattern: str, named: dict[str, nn.Module]) -> str:
    names = [name for name in named if name]
    near = get_close_matches(pattern, names, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; it has {', '.join(map(repr, names[:5]))}{', ...' * (len(names) > 5)}" if names else "; it has no submodules"


def _class(module: nn.Module) -> str:
    return type(module).__name__
