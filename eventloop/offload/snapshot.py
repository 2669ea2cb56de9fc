"""Snapshots: values for an offloaded handler, copied on the publisher's thread.

Nothing here waits for a device that has streams: copies from it are queued behind what the training thread has queued before,
and the consumer waits for them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch

from trainbus.eventloop.device import DeviceEvent, end_of_queue, is_asynchronous, queue_to_host
from trainbus.eventloop.events import Event

T = TypeVar("T")

IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)


class Owned(msgspec.Struct, Generic[T], eq=False):
    """Wrap the value that a ``capture=`` returns, so that the handler gets it without a copy.

    For captures that have made their own copy (a rendered figure, a cloned ``state_dict``): no other code may change the value
    afterwards.
    """

    value: T


class Snapshot(msgspec.Struct, eq=False):
    """A value under way to another thread; :meth:`resolve` waits for its copies and returns it, or ``finish(value)``.

    A struct because they are made on the training thread, in a third of the time that an ``__init__`` takes.
    """

    value: Any
    pending: tuple[Any, ...] = ()  # what it waits for: copies to the host (``DeviceEvent``, stacks of scalars), marks of lanes
    finish: Callable[[Any], Any] | None = None
    nbytes: int = 0  # of captured tensors and arrays, where a lane counts them
    source: tuple[type[Event], Any] | None = None  # kind and progress of the event that it was captured from, for errors

    def resolve(self) -> Any:
        """Return the value; called once, on the consumer's thread."""
        for one in self.pending:
            one.synchronize()
        return self.value if self.finish is None else self.finish(self.value)


def capture(value: Any) -> Snapshot:
    """Copy the value of ``capture=``: tensors (and numpy arrays) in any nesting of dicts, lists and tuples.

    Tensors arrive on the CPU, detached from the graph, in the shape they had.

    Raises:
        TypeError: the value holds a live module or optimizer, a whole event, or something that cannot be copied.
    """
    if isinstance(value, Owned):
        return Snapshot(value.value)
    copies = Copies()
    with torch.no_grad():
        copied = copies.copy(value)
    return Snapshot(copied, copies.fences())


def delayed(item: Any, behind: tuple[Any, ...]) -> Snapshot:
    """Return a snapshot, or one of another item of a lane, that also waits for what ``behind`` stands for."""
    snapshot = item if isinstance(item, Snapshot) else Snapshot(item)
    snapshot.pending = (*snapshot.pending, *behind)
    return snapshot


def nbytes(value: Any) -> int:
    """Return the bytes of all tensors and arrays in ``value``."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Owned):
        return nbytes(value.value)
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(nbytes, value))
    return 0


class Copies:
    """Copy values so that no other code can change them, and remember on which devices copies were queued."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def fences(self) -> tuple[DeviceEvent, ...]:
        """Mark this moment on the streams on which copies were queued."""
        return tuple([end_of_queue(device) for device in self._devices])

    def copy(self, value: Any) -> Any:
        """Return a copy of ``value``; call it without grad."""
        if isinstance(value, IMMUTABLE):
            return value
        if isinstance(value, torch.Tensor):
            if value.is_cpu or not is_asynchronous(device := value.device):
                return value.detach().clone().cpu()
            self._devices.add(device)
            return queue_to_host(value)
        if isinstance(value, dict):
            return {key: self.copy(entry) for key, entry in value.items()}
        if isinstance(value, list | set | frozenset):
            return type(value)(self.copy(entry) for entry in value)
        if isinstance(value, tuple):
            entries = [self.copy(entry) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
        if isinstance(value, np.ndarray):
            return np.array(value)
        return _copy_object(value)


def _copy_object(value: Any) -> Any:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        raise TypeError(
            f"capture= returned a live {type(value).__name__}; return the tensors you need, for instance "
            "event.run.model.head.weight or event.run.model.state_dict()"
        )
    if isinstance(value, Event):
        raise TypeError(
            f"capture= returned the whole {type(value).__name__}; pick what you need from it, or leave capture= out: the "
            "handler then gets the event without its live fields"
        )
    if isinstance(value, msgspec.Struct) and type(value).__struct_config__.frozen:
        fields = (getattr(value, name) for name in value.__struct_fields__)
        if all(isinstance(field, IMMUTABLE) for field in fields):
            return value  # Progress, above all
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise TypeError(
            f"capture= returned a {type(value).__name__}, which cannot be copied ({error}); return tensors, numbers or "
            "containers of them, or wrap it in Owned(...) if no other code changes it"
        ) from error


class Pickler(pickle.Pickler):
    """Reduce plain tensors to their bytes, which are written without a copy; torch's own way takes five times as long."""

    def reducer_override(self, value: Any) -> Any:
        """Return what a tensor is made of again; sparse and quantised tensors and subclasses are left to torch."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)
