"""``Memory``: measure how the resident memory of the process grows, and find the hook that keeps more and more objects.

Hooks, handlers and step functions keep what their attributes, closures and classes hold, and the globals that their code names.

A sample takes 20 µs, once a second. The objects of hooks are counted only while the process grows: on the recorder's thread,
with pauses, so that training continues. (tracemalloc would name lines, but it misses tensors and slows every allocation.)
"""

from __future__ import annotations

import gc
import sys
import time
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from trainbus.eventloop.platform import memory_in_use
from trainbus.eventloop.seams import CLOCK, Seam
from trainbus.observe.costs import Growth

_MOST_SAMPLES: Final = 240
_WARM_UP: Final = 0.25  # of the time so far is left out
_FEWEST: Final = 6  # samples behind the warm-up
_STEADY: Final = 4 << 20  # bytes of growth above which the objects of hooks are counted
_SOON, _APART = 2.0, 10.0  # least seconds from the first count of hooks to the second, and then from each to the next
MOST_OBJECTS: Final = Seam(200_000)  # of one hook
_PAUSE_EVERY: Final = 500  # objects, about 0.5 ms
_LEAST: Final = 16  # bytes that a hook must keep per iteration to be reported
_FEW_GRAPHS: Final = 0.01  # per iteration: each may be far larger than its tensor


class _Sample(NamedTuple):
    time: float
    iterations: int
    bytes: int


class Kept(NamedTuple):
    """The objects that an owner refers to."""

    bytes: int
    graphs: int  # number of tensors with a `grad_fn`, which keeps the graph that computed them


class _Look(NamedTuple):
    time: float
    iterations: int
    kept: dict[str, Kept]


class Memory:
    """Samples of the memory of the process, in bounded space."""

    def __init__(self, read: Callable[[], int] = memory_in_use) -> None:
        self._read = read
        self.resident = read()  # resident bytes at the last sample
        self._samples: list[_Sample] = []
        self._every, self._skipped = 1, 0  # of the samples offered, this one is kept
        self._looks: list[_Look] = []  # the first, and the newest

    def sample(
        self,
        iterations: int,
        hooks: Sequence[Any],
        subscriptions: Sequence[Any],
        steps: Mapping[str, Callable[..., Any]] = types.MappingProxyType({}),
    ) -> None:
        """Take a sample; while the process grows, also count the objects of hooks, handlers and step functions."""
        self.resident = self._read()
        self._skipped += 1
        if iterations and self._skipped >= self._every:
            self._skipped = 0
            self._samples.append(_Sample(CLOCK.value(), iterations, self.resident))
            if len(self._samples) > _MOST_SAMPLES:
                self._samples, self._every = self._samples[::2], 2 * self._every
        grown = self._process_growth()
        if grown is None or grown.bytes < _STEADY:
            self._looks.clear()
        elif not self._looks or CLOCK.value() - self._looks[-1].time >= (_SOON if len(self._looks) == 1 else _APART):
            kept = kept_by(_owners(hooks, subscriptions, steps))
            self._looks = [*self._looks[:1], _Look(CLOCK.value(), iterations, kept)]

    def growth(self) -> list[Growth]:
        """Return the growth of the process and of the hooks that keep more and more objects, the largest first."""
        process = self._process_growth()
        if process is None:
            return []
        return [process, *sorted(self._hook_growth(), key=lambda one: -one.bytes)]

    def _process_growth(self) -> Growth | None:
        """Compare the minimum of the last third with the first third's, because temporary memory is not growth."""
        own = self._samples
        own = own[int(_WARM_UP * len(own)) :]
        third = len(own) // 3
        if len(own) < _FEWEST:
            return None
        before, after = (min(some, key=lambda one: one.bytes) for some in (own[:third], own[-third:]))
        return Growth("process", after.bytes - before.bytes, after.time - before.time, after.iterations - before.iterations)

    def _hook_growth(self) -> Iterator[Growth]:
        if len(self._looks) < 2:
            return
        before, after = self._looks
        iterations = after.iterations - before.iterations
        for name, now in after.kept.items():
            then = before.kept.get(name, now)
            graphs = now.graphs - then.graphs > _FEW_GRAPHS * iterations
            if graphs or now.bytes - then.bytes >= _LEAST * max(iterations, 1):
                yield Growth(name, now.bytes - then.bytes, after.time - before.time, iterations, graphs)


def _owners(
    hooks: Sequence[Any], subscriptions: Iterable[Any], steps: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the names of hooks, plain handlers and step functions, each with the objects that a count starts from."""
    for hook in hooks:
        yield hook.label, _roots(hook)
    for one in subscriptions:
        if one.hook is None:
            yield one.label, _roots(one.handler)
    for name, step in steps.items():
        yield name, _roots(step)


def _roots(one: Any) -> list[Any]:
    """Return what an object and its classes hold. Its own attributes are last, because a count starts from the last one."""
    if isinstance(one, types.FunctionType):
        return [one]
    classes = [kind for kind in type(one).__mro__ if not _foreign_module(kind.__module__)]
    return [*(value for kind in classes for value in list(vars(kind).values())), *gc.get_referents(one)]


def kept_by(owners: Iterable[tuple[str, Sequence[Any]]]) -> dict[str, Kept]:
    """Count the objects that each owner refers to, tensors and arrays included.

    Objects of several owners count for the first. Models, optimizers, modules, classes, and the objects of torch and of
    `trainbus.eventloop` belong to no owner.
    """
    seen: set[int] = set()
    return {name: _kept(roots, seen) for name, roots in owners}


def _kept(roots: Sequence[Any], seen: set[int]) -> Kept:
    total = graphs = looked = 0
    stack = list(roots)
    while stack and looked < MOST_OBJECTS.value:
        one = stack.pop()
        if id(one) in seen or _is_foreign(one):
            continue
        seen.add(id(one))
        looked += 1
        if looked % _PAUSE_EVERY == 0:
            time.sleep(0)
        total += sys.getsizeof(one, 0)
        if isinstance(one, torch.Tensor):
            graphs += one.grad_fn is not None
            with suppress(Exception):  # a tensor without storage
                total += one.untyped_storage().nbytes()
        elif isinstance(one, types.FunctionType):
            stack += _held_by(one)
        elif type(one) is dict:  # since Python 3.13 the garbage collector does not see the attributes in an object's __dict__
            stack += (*one.keys(), *one.values())
        else:
            stack += gc.get_referents(one)
    return Kept(total, graphs)


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function refers to; of its module's globals only those that its code names."""
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield value
        elif not _foreign_module(value.__name__):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())
    yield from (function.__dict__, function.__kwdefaults__, function.__defaults__, function.__closure__)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


_SHARED: Final = (type, types.ModuleType, types.CodeType, torch.nn.Module, torch.optim.Optimizer)
_FOREIGN: Final = {"torch", "threading", "_thread", "structlog", "logging", "rich"}
_ENGINE: Final = "trainbus.eventloop."
_LIBRARIES: Final = _FOREIGN | sys.stdlib_module_names  # their functions and classes keep nothing of the user's


def _is_foreign(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(one, torch.nn.Parameter)
    if isinstance(one, types.FunctionType):
        return _foreign_module(one.__module__)
    return isinstance(one, _SHARED) or _is_of(type(one).__module__, _FOREIGN)


def _foreign_module(name: Any) -> bool:
    return _is_of(name, _LIBRARIES)


def _is_of(name: Any, packages: Container[str]) -> bool:
    return str(name).partition(".")[0] in packages or str(name).startswith(_ENGINE)
