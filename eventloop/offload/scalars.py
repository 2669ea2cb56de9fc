"""Take the scalars of an event on the training thread, as they are now, without waiting for a device.

Numbers, and tensors of one element on the CPU, are taken at once. Tensors of one element on another device are stacked there,
one stack for each dtype and device: this takes one kernel, and no number reaches the host. The consumer reads the stacks later.
From a device with streams it fetches all waiting stacks at once, by one copy for each dtype and number of scalars.

A name whose value once had several elements is a scalar only without dimensions: with one element, it may come from the
smaller last batch.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import msgspec
import numpy as np
import torch

from trainbus.eventloop.device import (
    DeviceEvent,
    DeviceStream,
    end_of_queue,
    is_asynchronous,
    new_stream,
    on_stream,
    queue_to_host,
    stream_finder,
)
from trainbus.eventloop.privates import set_grad_enabled

_MOST_WAITING = 1024  # stacks on a device that are fetched at a time, at most: the events of a full lane
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ScalarTaker:
    """Take the scalars of similar mappings, such as the outputs of iterations."""

    def __init__(self) -> None:
        self._sized: set[str] = set()  # names whose values had another number of elements than one
        self._fetches: dict[torch.device, _Fetches | None] = {}  # None: the device has no streams

    def take(self, outputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Stack]]:
        """Return the scalars of ``outputs`` by name, and stacks for the scalars of other devices, which are None until read.

        Other entries (logits, batches, objects) are left out.
        """
        numbers: dict[str, Any] = {}
        elsewhere: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
        for name, value in outputs.items():
            kind = type(value)
            if kind is float:
                numbers[name] = value
            elif kind in _PLAIN or isinstance(value, torch.Tensor):
                if value.ndim and (self._has_several(name, value) or kind not in _PLAIN or value.layout is not torch.strided):
                    continue  # one element of a sparse or a distributed tensor cannot be had without work
                if value.is_cpu and kind in _PLAIN:
                    numbers[name] = value.item()  # waits for nothing, and takes less time than a copy
                else:
                    numbers[name] = None
                    elsewhere.setdefault((value.dtype, value.device), {})[name] = value
            elif isinstance(value, np.ndarray | np.generic):
                if not (value.ndim and self._has_several(name, value)):
                    numbers[name] = value.item()
            elif isinstance(value, int | float | str):
                numbers[name] = value
        return numbers, [self._stack(device, tensors) for (_, device), tensors in elsewhere.items()] if elsewhere else []

    def _has_several(self, name: str, value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> bool:
        if math.prod(value.shape) != 1:
            self._sized.add(name)
        return name in self._sized

    def _stack(self, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> Stack:
        grad = torch.is_grad_enabled()
        set_grad_enabled(False)  # a tenth of the time that entering torch.no_grad() takes
        try:
            stacked = torch.stack([tensor.reshape(()) if tensor.ndim else tensor for tensor in tensors.values()])
        finally:
            set_grad_enabled(grad)
        if device not in self._fetches:
            self._fetches[device] = _Fetches(device) if is_asynchronous(device) else None
        fetches = self._fetches[device]
        return [*tensors], stacked if fetches is None else fetches.wrap(stacked)


class DeviceStack(msgspec.Struct, eq=False):
    """Stacked scalars on a device with streams. A consumer waits for them as for a :class:`DeviceEvent`."""

    tensor: torch.Tensor  # kept until the copy has arrived: another stream would use its memory again
    stream: DeviceStream
    fetches: _Fetches
    fetched: Fetched | None = None

    def query(self) -> bool:
        """Return True if :meth:`tolist` need not wait; begins the copy to the host."""
        return self.fetches.begin(self)[1].query()

    def synchronize(self) -> None:
        """Wait until the numbers are on the host."""
        self.fetches.begin(self)[1].synchronize()

    def tolist(self) -> list[Any]:
        """Return the numbers; waits for them."""
        host, arrived = self.fetches.begin(self)
        arrived.synchronize()
        return host.tolist()


class _Fetches:
    """Copy the stacks of one device to the host, all waiting ones at a time."""

    def __init__(self, device: torch.device) -> None:
        self._current_stream = stream_finder(device)
        self._waiting: deque[DeviceStack] = deque(maxlen=_MOST_WAITING)  # bounded: some may be of events that were dropped
        self._lock = threading.Lock()

    def wrap(self, tensor: torch.Tensor) -> DeviceStack:
        """Return ``tensor`` with the stream that makes it; on the training thread."""
        stack = DeviceStack(tensor, self._current_stream(), self)
        self._waiting.append(stack)
        return stack

    def begin(self, stack: DeviceStack) -> Fetched:
        """Return the tensor that ``stack`` is copied to and the event of its arrival; begins the copy if need be."""
        with self._lock:
            if stack.fetched is None:
                stacks = [self._waiting.popleft() for _ in range(len(self._waiting))]
                if stack not in stacks:
                    stacks.append(stack)
                _fetch(stacks)
            return cast("Fetched", stack.fetched)


Fetched = tuple[torch.Tensor, DeviceEvent]
Stack = tuple[list[str], torch.Tensor | DeviceStack]
"""Names, and the tensor of their values."""


_fetch_stream = cache(new_stream)  # by device


def _fetch(stacks: list[DeviceStack]) -> None:
    """Queue copies behind the work of the stacks' streams, on a separate stream, so that training does not wait for them."""
    device = stacks[0].tensor.device
    own = _fetch_stream(device)
    for stream in {one.stream for one in stacks}:
        own.wait_stream(stream)
    alike: dict[tuple[torch.dtype, int], list[DeviceStack]] = {}
    for one in stacks:
        alike.setdefault((one.tensor.dtype, len(one.tensor)), []).append(one)
    with on_stream(device, own):
        copies = [(group, queue_to_host(torch.stack([one.tensor for one in group]))) for group in alike.values()]
        arrived = end_of_queue(device)
    for group, rows in copies:
        for one, row in zip(group, rows, strict=True):
            one.fetched = row, arrived
