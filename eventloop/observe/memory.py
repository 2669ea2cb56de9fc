"""``Memory``: measure how the resident memory of the process grows, and find the hook that keeps more and more objects.

A sample takes 20 µs, once a second. The objects of hooks are counted only while the process grows: on the recorder's thread,
with pauses, so that training continues. (tracemalloc would name lines, but it misses tensors and slows every allocation.)
"""

from __future__ import annotations

import functools
import gc
import resource
import sys
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from eventloop.observe.costs import Growth

_STATM: Final = Path("/proc/self/statm")
_MOST_SAMPLES: Final = 240
_WARM_UP: Final = 0.25  # of the time so far is left out
_FEWEST: Final = 6  # samples behind the warm-up
_STEADY: Final = 4 << 20  # bytes of growth above which the objects of hooks are counted
_SOON, _APART = 2.0, 10.0  # least seconds from the first count of hooks to the second, and then from each to the next
_MOST_OBJECTS: Final = 200_000  # of one hook
_PAUSE_EVERY: Final = 500  # objects, about 0.5 ms
_LEAST: Final = 16  # bytes that a hook must keep per iteration to be reported


def resident() -> int:
    """Return the resident bytes of this process; without /proc, the peak so far."""
    with suppress(OSError):
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _Sample(NamedTuple):
    time: float
    iterations: int
    bytes: int


class _Look(NamedTuple):
    time: float
    iterations: int
    sizes: dict[str, int]


class Memory:
    """Samples of the memory of the process, in bounded space."""

    def __init__(self) -> None:
        self.resident = resident()
        """Resident bytes at the last sample."""
        self._samples: list[_Sample] = []
        self._every, self._skipped = 1, 0  # of the samples offered, this one is kept
        self._looks: list[_Look] = []  # the first, and the newest

    def sample(self, iterations: int, hooks: Sequence[Any], subscriptions: Sequence[Any]) -> None:
        """Take a sample; while the process grows, also count the objects of hooks and handlers."""
        self.resident = resident()
        self._skipped += 1
        if iterations and self._skipped >= self._every:
            self._skipped = 0
            self._samples.append(_Sample(time.monotonic(), iterations, self.resident))
            if len(self._samples) > _MOST_SAMPLES:
                self._samples, self._every = self._samples[::2], 2 * self._every
        grown = self._process_growth()
        if grown is None or grown.bytes < _STEADY:
            self._looks.clear()
        elif not self._looks or time.monotonic() - self._looks[-1].time >= (_SOON if len(self._looks) == 1 else _APART):
            sizes = sizes_of(_owners(hooks, subscriptions))
            self._looks = [*self._looks[:1], _Look(time.monotonic(), iterations, sizes)]

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
        for name, size in after.sizes.items():
            more = size - before.sizes.get(name, size)
            if more >= _LEAST * max(iterations, 1):
                yield Growth(name, more, after.time - before.time, iterations)


def _owners(hooks: Sequence[Any], subscriptions: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the names of hooks and plain handlers, each with the objects that a count starts from."""
    for hook in hooks:
        yield hook.label, [vars(hook)] if hasattr(hook, "__dict__") else []
    for one in subscriptions:
        if one.hook is None:
            handler = one.handler.func if isinstance(one.handler, functools.partial) else one.handler
            # A method holds its object, a function its closure.
            yield one.label, [getattr(handler, name, None) for name in ("__self__", "__closure__", "__dict__")]


def sizes_of(owners: Iterable[tuple[str, list[Any]]]) -> dict[str, int]:
    """Return the bytes of the objects that each owner refers to, tensors and arrays included.

    Objects of several owners count for the first. Models, optimizers, modules, classes, and the objects of torch and of
    `eventloop` belong to no owner.
    """
    seen: set[int] = set()
    return {name: _size(roots, seen) for name, roots in owners}


def _size(roots: list[Any], seen: set[int]) -> int:
    total = looked = 0
    stack = list(roots)
    while stack and looked < _MOST_OBJECTS:
        one = stack.pop()
        if id(one) in seen or _is_foreign(one):
            continue
        seen.add(id(one))
        looked += 1
        if looked % _PAUSE_EVERY == 0:
            time.sleep(0)
        total += sys.getsizeof(one, 0)
        if isinstance(one, torch.Tensor):
            with suppress(Exception):  # a tensor without storage
                total += one.untyped_storage().nbytes()
        else:
            stack += gc.get_referents(one)
    return total


_SHARED: Final = (type, types.ModuleType, types.FunctionType, types.CodeType, torch.nn.Module, torch.optim.Optimizer)
_FOREIGN: Final = ("torch", "eventloop", "threading", "_thread", "structlog", "logging", "rich")


def _is_foreign(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(one, torch.nn.Parameter)
    return isinstance(one, _SHARED) or str(type(one).__module__).partition(".")[0] in _FOREIGN
