"""What travels to a worker process: detached events as msgpack, captured values as a pickle with their tensors beside it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from eventloop.events import Event
from eventloop.events.event import registry
from eventloop.offload.detach import from_msgpack
from eventloop.offload.segment import Bytes, Extent, Segment, lay_out
from eventloop.offload.target import Origin, load, origin_of


class Parcel(msgspec.Struct, array_like=True):
    """Where in a segment what is. ``number`` of the parts are events or tensors; the rest belong to the pickle.

    ``origins`` are the modules that declare the events; empty for captured values, whose pickle is the first part.
    """

    number: int
    origins: list[Origin]
    extents: list[Extent]


class Ticket(msgspec.Struct, array_like=True):
    """The only thing that goes through the pipe: where in a segment, and of what size, the :class:`Parcel` is."""

    extent: Extent
    size: int


def pack(items: Sequence[Any], segment: Segment) -> bytes:
    """Write ``items`` to ``segment`` and return what the other side needs to :func:`unpack` them.

    Raises:
        TypeError: an event has a field that msgpack cannot hold.
        Exception: whatever an object in a captured value raises when it is pickled.
    """
    number, origins, parts = _events(items) if all(isinstance(item, Event) for item in items) else _values(items)
    extents = lay_out([part.nbytes for part in parts])
    label = np.frombuffer(msgspec.msgpack.encode(Parcel(number, origins, extents)), np.uint8)
    extents.append((lay_out([*(part.nbytes for part in parts), label.nbytes])[-1][0], label.nbytes))
    segment.write([*parts, label], extents)
    return msgspec.msgpack.encode(Ticket(extents[-1], segment.size))


def unpack(ticket: bytes, segment: Segment) -> list[Any]:
    """Return what :func:`pack` was given; copies, which the handler may keep."""
    at = msgspec.msgpack.decode(ticket, type=Ticket)
    [label] = segment.read([at.extent], at.size)
    parcel = msgspec.msgpack.decode(label.data, type=Parcel)
    parts = segment.read(parcel.extents, at.size)
    if parcel.origins:
        for origin in parcel.origins:
            load(origin)  # declares the events, where the handler's module does not
        return [from_msgpack(part.tobytes()) for part in parts]
    values: list[Any] = _Unpickler(parts[0], parts[1 : parcel.number + 1], parts[parcel.number + 1 :]).load()
    return values


def _events(items: Sequence[Event]) -> tuple[int, list[Origin], list[Bytes]]:
    # The class that is registered: one that was detached is a twin of it, of the same module.
    modules = {registry[item.mount_point].__module__ for item in items}
    return len(items), [origin_of(module) for module in modules], [_bytes(item.to_msgpack()) for item in items]


def _values(items: Sequence[Any]) -> tuple[int, list[Origin], list[Bytes]]:
    pickler = _Pickler()
    pickler.dump(list(items))
    return len(pickler.tensors), [], [_bytes(pickler.file.getbuffer()), *pickler.tensors, *pickler.buffers]


def _bytes(buffer: Any) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.empty(0, np.uint8)


class _Pickler(pickle.Pickler):
    """Leaves the bytes of tensors and arrays out of the pickle: they would be copied twice more."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.tensors: list[Bytes] = []
        self.buffers: list[Bytes] = []
        super().__init__(self.file, protocol=5, buffer_callback=lambda buffer: self.buffers.append(_bytes(buffer.raw())))

    def persistent_id(self, value: Any) -> Any:
        """Take a plain tensor out; what is sparse, quantised or of a subclass goes torch's own way."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        self.tensors.append(flat.view(torch.uint8).numpy())
        return len(self.tensors) - 1, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: Bytes, tensors: list[Bytes], buffers: list[Bytes]) -> None:
        super().__init__(io.BytesIO(pickled.data), buffers=buffers)
        self._tensors = tensors

    def persistent_load(self, reference: Any) -> torch.Tensor:
        index, dtype, shape = reference
        part = self._tensors[index]
        return torch.frombuffer(part, dtype=dtype).reshape(shape) if part.nbytes else torch.empty(shape, dtype=dtype)
