"""Take the scalars of an event on the training thread, as they are now, without waiting for a device.

Numbers are taken as they are. Tensors of one element are stacked on their device, one stack for each dtype and device: that is
one kernel, and no number reaches the host. The consumer reads the stacks later. From a GPU it fetches all stacks that wait
with one copy.

The outputs of an iteration nearly always have the same scalars as those before. A plan notes which they are, and an iteration
only checks that its plan still holds. A value that had several elements once is not a scalar while it has dimensions, even
with one element: that is the smaller last batch.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch

_MOST_PLANS = 64  # for outputs whose names never repeat; a new plan costs some 10 µs
_MOST_WAITING = 1024  # stacks on a GPU that one copy fetches at most: the events of a full lane
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Looked up once: a hundred nanoseconds are a tenth of what an event may cost. Switching grad mode by hand is ten times cheaper
# than entering torch.no_grad().
_dtype = attrgetter("dtype")
_stack = torch.stack
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled


class ScalarTaker:
    """Takes the scalars of mappings that are mostly alike, such as the outputs of iterations."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, ...], ScalarPlan] = {}
        self._sized: set[str] = set()  # names whose values had another number of elements than one

    def take(self, outputs: Mapping[str, Any]) -> Taken:
        """Take the scalars of ``outputs``; other entries (logits, batches, objects) are left out."""
        names = tuple(outputs)
        values = tuple(outputs.values())
        plan = self._plans.get(names)
        if plan is not None:
            try:
                taken = plan.take(values)
            except (RuntimeError, TypeError, AttributeError, ValueError):  # a scalar has another shape or kind now
                taken = None
            if taken is not None:
                return taken
        arrays = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor | np.ndarray)}
        self._sized.update(name for name, value in arrays.items() if math.prod(value.shape) != 1)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[names] = ScalarPlan(names, values, self._sized)
        return cast("Taken", plan.take(values))


class ScalarPlan:
    """Which values of a mapping with certain names are scalars, and how they are taken."""

    def __init__(self, names: Sequence[str], values: Sequence[Any], sized: Collection[str]) -> None:
        kinds = [_kind(value, sized=name in sized) for name, value in zip(names, values, strict=True)]
        tensors = [i for i, kind in enumerate(kinds) if kind == "tensor"]
        numbers = [i for i, kind in enumerate(kinds) if kind == "number"]
        rest = [i for i, kind in enumerate(kinds) if kind != "tensor"]  # stacking checks the tensors
        self._rest = _getter(rest) if rest else None
        self._rest_types = [type(values[i]) for i in rest]
        self._others = _getter([i for i in rest if kinds[i] == "other" and hasattr(values[i], "ndim")])
        self._number = _getter(numbers)
        self._numpy = any(isinstance(values[i], np.generic | np.ndarray) for i in numbers)
        self._shaped = [i for i in tensors if values[i].ndim]
        keys: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in tensors:
            keys.setdefault((values[i].dtype, values[i].device), []).append(i)
        self._groups = [_Group(*key, positions, len(values)) for key, positions in keys.items()]
        self.waits = any(group.on_gpu for group in self._groups)
        """Whether reading the stacks means waiting for a copy."""
        taken = [*numbers, *(position for group in self._groups for position in group.positions)]
        self._names = [names[position] for position in sorted(taken)]
        self._order = None if taken == sorted(taken) else _getter([taken.index(position) for position in sorted(taken)])

    def take(self, values: tuple[Any, ...]) -> Taken | None:
        """Take the planned values; None if they are of other kinds than planned.

        Raises:
            RuntimeError, TypeError, AttributeError, ValueError: a value that was planned as a scalar is not one.
        """
        numbers: tuple[Any, ...] = ()
        if self._rest is not None:
            if [*map(type, self._rest(values))] != self._rest_types:
                return None
            if not all(value.ndim for value in self._others(values)):
                return None  # it has become a scalar
            numbers = self._number(values)
            if self._numpy:
                numbers = tuple([value.item() if isinstance(value, np.generic | np.ndarray) else value for value in numbers])
        if self._shaped:
            reshaped = list(values)
            for i in self._shaped:
                reshaped[i] = values[i].detach().reshape(())
            values = tuple(reshaped)
        stacks = []
        for group in self._groups:
            stacked = group.stack(values)
            if stacked is None:
                return None
            stacks.append(stacked)
        return self, numbers, stacks

    def read(self, numbers: Sequence[Any], stacks: Sequence[torch.Tensor | DeviceStack]) -> dict[str, Any]:
        """Return the scalars by name, in the order of the outputs; on the consumer's thread, which may wait."""
        found = [*numbers]
        for stack in stacks:
            found += stack.tolist()
        return dict(zip(self._names, found if self._order is None else self._order(found), strict=True))


Taken = tuple[ScalarPlan, tuple[Any, ...], list[Any]]
"""The plan that reads them, the numbers, and the stacks of the tensors' values (a tensor, or a DeviceStack)."""


class _Group:
    """The scalars of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, positions: list[int], width: int) -> None:
        self.positions = positions
        self.on_gpu = device.type == "cuda"
        self._pick = None if positions == list(range(width)) else _getter(positions)
        self._dtypes = [dtype] * len(positions)
        self._device = device
        self._fetches = _Fetches(device) if self.on_gpu else None
        self._elsewhere = torch.accelerator.is_available()  # not asked on import: that could break CUDA in forked processes

    def stack(self, values: tuple[Any, ...]) -> torch.Tensor | DeviceStack | None:
        """Copy the scalars; None if one has another dtype or device by now (a number that is converted may be another)."""
        tensors = values if self._pick is None else self._pick(values)
        if [*map(_dtype, tensors)] != self._dtypes:
            return None
        grad = _is_grad_enabled()
        _set_grad_enabled(False)
        try:
            stacked = _stack(tensors)
        finally:
            _set_grad_enabled(grad)
        if stacked.ndim != 1 or (self._elsewhere and stacked.device != self._device):
            return None
        return stacked if self._fetches is None else self._fetches.wrap(stacked)


class DeviceStack(msgspec.Struct, eq=False):
    """Stacked scalars on a GPU. A consumer waits for them as for a ``torch.cuda.Event``."""

    tensor: torch.Tensor  # kept until the copy has arrived: another stream would use its memory again
    stream: torch.cuda.Stream
    fetches: _Fetches
    fetched: Fetched | None = None

    def query(self) -> bool:
        """Return True if :meth:`tolist` need not wait; begins the copy to the host."""
        return bool(self.fetches.begin(self)[1].query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the numbers are on the host."""
        self.fetches.begin(self)[1].synchronize()

    def tolist(self) -> list[Any]:
        """Return the numbers; waits for them."""
        host, arrived = self.fetches.begin(self)
        arrived.synchronize()
        return host.tolist()


class _Fetches:
    """Copies of one group's stacks to the host: each takes all that wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._waiting: deque[DeviceStack] = deque(maxlen=_MOST_WAITING)  # bounded: some may be of events that were dropped
        self._lock = threading.Lock()

    def wrap(self, tensor: torch.Tensor) -> DeviceStack:
        """Return ``tensor`` with the stream that makes it; on the training thread."""
        raw = self._raw_stream(self._index)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = torch.cuda.current_stream(self._device)
        stack = DeviceStack(tensor, stream, self)
        self._waiting.append(stack)
        return stack

    def begin(self, stack: DeviceStack) -> Fetched:
        """Return the tensor that ``stack`` is copied to and the event of its arrival; begins the copy if need be."""
        with self._lock:
            if stack.fetched is None:
                stacks = [self._waiting.popleft() for _ in range(len(self._waiting))]
                if stack not in stacks:
                    stacks.append(stack)
                hosts, arrived = _fetch([one.tensor for one in stacks], {one.stream for one in stacks})
                for one, host in zip(stacks, hosts.unbind(), strict=True):
                    one.fetched = host, arrived
            return cast("Fetched", stack.fetched)


Fetched = tuple[torch.Tensor, torch.cuda.Event]


_fetch_stream = cache(torch.cuda.Stream)  # by device


def _fetch(tensors: list[torch.Tensor], streams: set[torch.cuda.Stream]) -> Fetched:
    """Queue a copy behind what ``streams`` have queued, on a stream of its own: training does not wait for it."""
    own = _fetch_stream(tensors[0].device)
    for stream in streams:
        own.wait_stream(stream)
    with torch.cuda.stream(own):
        return pinned(_stack(tensors)), own.record_event()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy of ``tensor`` to the host on the current stream, and return where it will be."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def _kind(value: Any, *, sized: bool) -> Literal["number", "tensor", "other"]:
    if isinstance(value, torch.Tensor):
        # One element of a sparse or a distributed tensor cannot be had without work.
        shaped = value.ndim and (sized or type(value) not in _PLAIN or value.layout is not torch.strided)
        return "other" if shaped else "tensor"
    if isinstance(value, np.ndarray):
        return "other" if value.ndim and sized else "number"
    return "number" if isinstance(value, int | float | str | np.generic) else "other"


def _getter(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return ``lambda values: tuple(values[i] for i in positions)``, in C where there are several."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[i] for i in positions])
