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
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from eventloop.errors import SubscribeError
from eventloop.events import AfterModuleBackward, AfterModuleForward, BeforeModuleBackward, BeforeModuleForward, ModuleEvent

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

Publish = Callable[[ModuleEvent], object]


class Watch:
    """The handle that ``bus.watch(model, ...)`` returns. ``detach()`` it, or use it as a context manager."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...], detach: Callable[[Watch], object]) -> None:
        self._modules = tuple((name, weakref.ref(module)) for name, module in _matching(model, patterns or ("*",)))
        self._detach = detach

    @property
    def names(self) -> tuple[str, ...]:
        """The qualified names of the watched modules; that of the model itself is ``""``."""
        return tuple(name for name, _ in self._modules)

    @property
    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules, of those that still exist."""
        return ((name, module) for name, reference in self._modules if (module := reference()) is not None)

    def detach(self) -> None:
        """Stop publishing events of these modules and remove the hooks from them. Idempotent."""
        self._detach(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Watch of {', '.join(map(repr, self.names))}>"


class _Attached(NamedTuple):
    """The hooks on one module."""

    name: str
    handles: dict[type[ModuleEvent], RemovableHandle]


class Watches:
    """All watches of a bus, and the torch hooks on their modules. Use it under the lock of the bus.

    A module of several watches has the hooks of the first one, so that its events are published once.
    """

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._attached: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._watches or self._attached)

    def add(self, watch: Watch) -> None:
        """Add a watch; the next :meth:`attach` attaches its hooks."""
        self._watches.append(watch)

    def remove(self, watch: Watch) -> None:
        """Remove a watch if it is there; the next :meth:`attach` removes its hooks."""
        if watch in self._watches:
            self._watches.remove(watch)

    def attach(self, kinds: Collection[type[ModuleEvent]], publish: Publish) -> None:
        """Attach hooks for events of these classes to the watched modules, and remove all others."""
        watched = {module: name for watch in reversed(self._watches) for name, module in watch.modules}
        for module, attached in list(self._attached.items()):
            stays = watched.get(module) == attached.name
            for kind in attached.handles.keys() - (set(kinds) if stays else set()):
                attached.handles.pop(kind).remove()
            if not stays:
                del self._attached[module]
        added = False
        for module, name in watched.items():
            handles = self._attached.setdefault(module, _Attached(name, {})).handles
            for kind in kinds:
                if kind not in handles:
                    handles[kind] = KINDS[kind].register(module, _tap_class()(publish, kind, name))
                    added = True
        if added:
            # Code that torch.compile made from a model without hooks does not check for new hooks.
            torch.compiler.reset()


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

    def __init__(self, publish: Publish, kind: type[ModuleEvent], name: str) -> None:
        self._publish = publish
        self._kind = kind
        self._name = name

    def __call__(self, module: nn.Module, *values: Any) -> None:
        try:
            fields = dict(zip(KINDS[self._kind].fields, values, strict=True))
            self._publish(self._kind(module_name=self._name, module=module, **fields))
        except Exception as error:
            error.add_note(f"published by the watched module {self._name!r} ({type(module).__name__})")
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
        if not isinstance(pattern, str):
            raise SubscribeError(f'bus.watch: {pattern!r} is not a pattern; give names of submodules, such as "encoder.*"')
        names = [name for name in named if fnmatchcase(name, pattern)]
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


def _nearest(pattern: str, named: dict[str, nn.Module]) -> str:
    names = [name for name in named if name]
    near = get_close_matches(pattern, names, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; it has {', '.join(map(repr, names[:5]))}{', ...' * (len(names) > 5)}" if names else "; it has no submodules"


def _class(module: nn.Module) -> str:
    return type(module).__name__
