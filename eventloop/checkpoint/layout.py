"""Where each tensor of a tree lies in the buffer and in the file; computed once while the set of tensors stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import torch

from eventloop.checkpoint.header import (
    FOREIGN_NAMES,
    RESERVED,
    SAFE_NAMES,
    Entry,
    Foreign,
    render_start,
)
from eventloop.checkpoint.tree import Flat, join
from eventloop.errors import CheckpointValueError


class Layout:
    """Offsets, names and the first part of the header for one set of tensors.

    Raises:
        CheckpointValueError: for a tensor that cannot be staged, with its path.
    """

    def __init__(self, flat: Flat) -> None:
        check(flat)
        self._places = (flat.parents, flat.keys)
        self._facts = _facts(flat.tensors)
        self._originals = _originals(flat.tensors, self._facts[_POINTERS])
        self.shapes = [tuple(tensor.shape) for tensor in flat.tensors]
        self._empty = [(index, shape) for index, shape in enumerate(self.shapes) if 0 in shape]
        self.dtypes = [tensor.dtype for tensor in flat.tensors]
        #: The staged tensors in the order of the file: widest elements first, so that each one is aligned.
        self.order = sorted(
            (index for index, original in enumerate(self._originals) if index == original),
            key=lambda index: (-self.dtypes[index].itemsize, str(self.dtypes[index])),
        )
        self.bytes, entries = self._entries(flat)
        self.start = render_start(entries)
        self.packed_slots = self._pack_slots()
        self.packed_foreign = self._pack_foreign()
        #: Whether there are tensors on CUDA devices, which are copied faster, and without waiting, into pinned memory.
        self.pinned = _any_cuda(flat.tensors)

    def fits(self, flat: Flat) -> bool:
        """Whether the layout holds for another tree: the same places, shapes, dtypes, aliases, kind of device.

        It runs at every save, so it looks at each tensor once and makes nothing that the garbage collector tracks.
        Hence no shapes: two of them with as many dimensions and elements are equal, or not broadcastable, and then the
        copy raises; only for empty tensors is that not so.

        Raises:
            RuntimeError: a tensor without memory of its own (sparse …).
        """
        if (flat.parents, flat.keys) != self._places:
            return False
        if any(tuple(flat.tensors[index].shape) != shape for index, shape in self._empty):
            return False
        facts = _facts(flat.tensors)
        if facts == self._facts and len(self.order) == len(flat.tensors):
            return True  # nothing moved, and where no two tensors begin at one address there are no aliases
        return (
            all(facts[part] == self._facts[part] for part in _FORM)
            and _originals(flat.tensors, facts[_POINTERS]) == self._originals
            and _any_cuda(flat.tensors) == self.pinned
        )

    def _entries(self, flat: Flat) -> tuple[int, dict[str, Entry]]:
        entries: dict[str, Entry] = {}
        end = 0
        for index in self.order:
            shape, dtype = self.shapes[index], self.dtypes[index]
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            stored = shape if dtype in SAFE_NAMES else (end - begin,)
            name = _unique_name(join(flat.parents[index], flat.keys[index]), entries)
            entries[name] = Entry(SAFE_NAMES.get(dtype, "U8"), stored, (begin, end))
        return end, entries

    def _pack_slots(self) -> msgspec.Raw:
        ranks = {index: rank for rank, index in enumerate(self.order)}
        return msgspec.Raw(msgspec.msgpack.encode([ranks[original] for original in self._originals]))

    def _pack_foreign(self) -> msgspec.Raw:
        foreign = {
            rank: Foreign(FOREIGN_NAMES[self.dtypes[index]], self.shapes[index])
            for rank, index in enumerate(self.order)
            if self.dtypes[index] not in SAFE_NAMES
        }
        return msgspec.Raw(msgspec.msgpack.encode(foreign))

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """One view of `memory` (flat, uint8) per staged tensor, in the order of the file."""
        views: list[torch.Tensor] = []
        end = 0
        for dtype, group in groupby(self.order, key=self.dtypes.__getitem__):
            shapes = [self.shapes[index] for index in group]
            sizes = [math.prod(shape) for shape in shapes]
            begin, end = end, end + sum(sizes) * dtype.itemsize
            # One split per dtype: slicing the buffer for each of 20,000 tensors takes three times as long.
            parts = memory[begin:end].view(dtype).split_with_sizes(sizes)
            views += [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return views


# Four facts per tensor in one flat list, gathered in one pass: most of the time goes into fetching each from memory.
_FORM = (slice(0, None, 4), slice(1, None, 4), slice(2, None, 4))
_POINTERS = slice(3, None, 4)


def _facts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [fact for each in tensors for fact in (each.dtype, each.numel(), each.dim(), each.data_ptr())]


def _any_cuda(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


def _originals(tensors: Sequence[torch.Tensor], pointers: list[int]) -> list[int]:
    """For each tensor, the index of the first one that is the same memory in the same form."""
    if len(set(pointers)) == len(pointers):
        return list(range(len(pointers)))
    originals: list[int] = []
    seen: dict[int, list[int]] = {}
    for index, pointer in enumerate(pointers):
        same = seen.setdefault(pointer, [])
        original = next((other for other in same if _is_alias(tensors[other], tensors[index])), index)
        if original == index and pointer:  # every empty tensor is at address 0, and stands for itself
            same.append(index)
        originals.append(original)
    return originals


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def check(flat: Flat) -> None:
    """Refuse what cannot be staged.

    Raises:
        CheckpointValueError: with the path of the first sparse, quantised, meta or sub-byte tensor.
    """
    for tensor, parent, key in zip(flat.tensors, flat.parents, flat.keys, strict=True):
        problem, way_out = _problem(tensor)
        if problem:
            path = join(parent, key) or "the tree"
            raise CheckpointValueError(f"{path}: cannot store a {problem} tensor; the way out: {way_out}")


def _problem(tensor: torch.Tensor) -> tuple[str, str]:
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch."), "x.to_dense(), or its indices and values"
    if tensor.is_quantized:
        return "quantised", "x.int_repr(), with its scale and zero point"
    if tensor.is_meta:
        return "meta", "give it memory first (module.to_empty(device=...))"
    if tensor.dtype not in SAFE_NAMES and tensor.dtype not in FOREIGN_NAMES:
        return str(tensor.dtype).removeprefix("torch."), "x.view(torch.uint8)"
    return "", ""


def _unique_name(path: str, taken: dict[str, Entry]) -> str:
    # JSON cannot hold lone surrogates; the tree keeps the exact key, the name is for people.
    wanted = path.encode("utf-8", "replace").decode() or "tensor"
    name, number = wanted, 2
    while name in taken or name in RESERVED:
        name, number = f"{wanted}#{number}", number + 1
    return name
