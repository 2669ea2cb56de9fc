"""Send items to a worker process: detached events as msgpack, captured values as a pickle with their tensors beside it.

The data go through shared memory and only their size through the pipe, so that writing to the pipe never waits for its reader.
The memory holds one parcel at a time, because the calls of a lane are in order. It has no name and disappears with its last
process, however that ends, so nothing can leak. (Measured against the pipe and torch.multiprocessing's tensors:
benchmarks/README.md.)
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import registry
from trainbus.eventloop.offload.detach import from_msgpack, from_plain
from trainbus.eventloop.offload.importable import file_of, load

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64  # of every part, so that copies run at full speed


def pack(items: list[Any], segment: SharedSegment) -> bytes:
    """Write ``items`` to ``segment``, and return the ticket with which the other side can :func:`unpack` them.

    Raises:
        TypeError: an event has a field that msgpack cannot hold.
        Exception: the error of an object in a captured value that cannot be pickled.
    """
    pickler = _Pickler()
    pickler.dump(items)
    parts = segment.write([np.asarray(part) for part in (pickler.file.getbuffer(), *(one.raw() for one in pickler.parts))])
    return msgspec.msgpack.encode((segment.size, parts))


def unpack(ticket: bytes, segment: SharedSegment) -> list[Any]:
    """Return the items of :func:`pack`; copies, which the handler may keep."""
    pickled, *parts = segment.read(*msgspec.msgpack.decode(ticket))
    items: list[Any] = pickle.loads(pickled.data, buffers=parts)  # noqa: S301 - our own bytes
    return items


class _Pickler(pickle.Pickler):
    """Keep the bytes of tensors and arrays out of the pickle, in which they would be copied twice more."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.parts: list[pickle.PickleBuffer] = []
        super().__init__(self.file, protocol=5, buffer_callback=self.parts.append)

    def reducer_override(self, value: Any) -> Any:
        """Reduce events to msgpack and plain tensors to bytes; torch reduces sparse and quantised tensors and subclasses."""
        if isinstance(value, Event):
            # The module of the registered class: a detached event's class is made from that.
            module = registry[value.mount_point].__module__
            try:
                return _event, (module, file_of(module), value.to_msgpack(), from_msgpack)
            except OverflowError:  # msgpack has no integers beyond 64 bits: the operations of a large model, say
                return _event, (module, file_of(module), value.to_plain(), from_plain)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return _tensor, (pickle.PickleBuffer(flat.view(torch.uint8).numpy()), value.dtype, tuple(value.shape))


def _tensor(part: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(part, dtype=dtype).reshape(shape) if part.nbytes else torch.empty(shape, dtype=dtype)


def _event(module: str, file: str | None, encoded: Any, decode: Callable[[Any], Event]) -> Event:
    load(module, file)  # declares the event, where the handler's module does not
    return decode(encoded)


class SharedSegment:
    """Memory shared by two processes: one makes and writes it, the other gets its descriptor and reads it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._writes = descriptor is None
        self.descriptor = _memory() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self.size = 0
        """Bytes that are mapped."""

    def write(self, parts: Sequence[Bytes]) -> int:
        """Copy ``parts``, after an array of their lengths, and return their number; the copies release the GIL."""
        lengths = np.array([part.nbytes for part in parts], np.int64).view(np.uint8)
        starts = _starts([lengths.nbytes, *(part.nbytes for part in parts)])
        memory = self._bytes(starts[-1])
        for start, part in zip(starts, [lengths, *parts], strict=False):
            memory[start : start + part.nbytes] = part
        return len(parts)

    def read(self, size: int, number: int) -> list[Bytes]:
        """Return copies of the parts that are in a segment of ``size`` bytes."""
        memory = self._bytes(size)
        lengths = memory[: 8 * number].view(np.int64).tolist()
        starts = _starts([8 * number, *lengths])[1:]
        return [memory[start : start + length].copy() for start, length in zip(starts, lengths, strict=False)]

    def __reduce__(self) -> Any:
        # Works while a process is spawned, which inherits the descriptor, and at no other time.
        return _attach, (DupFd(self.descriptor),)

    def close(self) -> None:
        """Release the memory."""
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self.descriptor)

    def _bytes(self, needed: int) -> Bytes:
        if self._map is None or needed > self.size:
            # It stays as large as the largest parcel was: the next may be as large.
            size = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            if self._writes:
                os.ftruncate(self.descriptor, size)
            larger = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_WRITE if self._writes else mmap.ACCESS_READ)
            if self._map is not None:  # after the calls that fail where memory is short: smaller parcels still fit
                self._map.close()
            self._map, self.size = larger, size
        return np.frombuffer(self._map, np.uint8)


def _starts(lengths: Iterable[int]) -> list[int]:
    """Return the aligned begin of each part, and the end of the last one."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _attach(descriptor: Any) -> SharedSegment:
    return SharedSegment(descriptor.detach())


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainbus")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
