"""Where each tensor of a tree lies in the buffer and in the file; computed once while the set of tensors stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import msgspec
import torch

from eventloop.checkpoint.header import (
    FOREIGN_NAMES,
    MAX_HEADER_BYTES,
    RESERVED,
    SAFE_NAMES,
    Entry,
    Foreign,
    render_start,
)
from eventloop.checkpoint.tree import join
from eventloop.errors import CheckpointValueError

_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]  # a getset descriptor, which the stubs call a Size
_dtype = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # likewise
_is_cuda = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # likewise


class Signature(msgspec.Struct, frozen=True):
    """What must be equal for a layout to be used again. Lists that C code fills and compares: it is on the hot path."""

    places: list[tuple[str, object]]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    on_cuda: list[bool]
    originals: list[int] | None
    """For each tensor, the index of the first one that is the same memory; None where no two are."""


class Layout:
    """Offsets, names and the first part of the header for one set of tensors."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        originals = signature.originals or range(len(signature.places))
        unique = [index for index, original in enumerate(originals) if index == original]
        #: The staged tensors in the order of the file: widest elements first, so that each one is aligned.
        self.order = sorted(unique, key=lambda index: (-signature.dtypes[index].itemsize, str(signature.dtypes[index])))
        ranks = {index: rank for rank, index in enumerate(self.order)}
        #: For each tensor of the tree, its rank in the file.
        self.slots = [ranks[original] for original in originals]
        self.bytes, entries = self._entries()
        self.start = render_start(entries)
        if len(self.start) > MAX_HEADER_BYTES - 1000:
            raise CheckpointValueError(
                f"{len(self.order)} tensors need a header of {len(self.start)} bytes, 100 MB is the limit"
            )
        self.foreign = self._foreign()
        self.packed_slots = msgspec.Raw(msgspec.msgpack.encode(self.slots))
        self.packed_foreign = msgspec.Raw(msgspec.msgpack.encode(self.foreign))
        self.pinned = any(signature.on_cuda)

    def _entries(self) -> tuple[int, dict[str, Entry]]:
        entries: dict[str, Entry] = {}
        end = 0
        for index in self.order:
            shape, dtype = self.signature.shapes[index], self.signature.dtypes[index]
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            stored = tuple(shape) if dtype in SAFE_NAMES else (end - begin,)
            name = _unique_name(self.signature.places[index], entries)
            entries[name] = Entry(SAFE_NAMES.get(dtype, "U8"), stored, (begin, end))
        return end, entries

    def _foreign(self) -> dict[int, Foreign]:
        shapes, dtypes = self.signature.shapes, self.signature.dtypes
        return {
            rank: Foreign(FOREIGN_NAMES[dtypes[index]], tuple(shapes[index]))
            for rank, index in enumerate(self.order)
            if dtypes[index] not in SAFE_NAMES
        }

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """One view of `memory` (flat, uint8) per staged tensor, in the order of the file."""
        shapes, dtypes = self.signature.shapes, self.signature.dtypes
        views: list[torch.Tensor] = []
        end = 0
        for dtype, group in groupby(self.order, key=dtypes.__getitem__):
            members = list(group)
            sizes = [math.prod(shapes[index]) for index in members]
            begin, end = end, end + sum(sizes) * dtype.itemsize
            # One split per dtype: slicing the buffer for each of 20,000 tensors takes three times as long.
            parts = memory[begin:end].view(dtype).split_with_sizes(sizes)
            views += [part.view(shapes[index]) for part, index in zip(parts, members, strict=True)]
        return views


def sign(tensors: Sequence[torch.Tensor], places: list[tuple[str, object]]) -> Signature:
    """The signature of a set of tensors.

    Raises:
        RuntimeError: a tensor without memory of its own (sparse …); `check` finds out which and says it better.
    """
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    on_cuda = list(map(_is_cuda, tensors)) if cuda else []
    shapes, dtypes = list(map(_shape, tensors)), list(map(_dtype, tensors))
    return Signature(places, shapes, dtypes, on_cuda, _originals(tensors))


def _originals(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    pointers = list(map(torch.Tensor.data_ptr, tensors))
    if len(set(pointers)) == len(pointers):
        return None
    originals: list[int] = []
    first: dict[int, list[int]] = {}
    for index, pointer in enumerate(pointers):
        same = first.setdefault(pointer, [])
        original = next((other for other in same if _is_alias(tensors[other], tensors[index])), index)
        if original == index:
            same.append(index)
        originals.append(original)
    return originals


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return (
        one.numel() > 0  # all empty tensors live at address 0
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def check(tensors: Sequence[torch.Tensor], places: Sequence[tuple[str, object]]) -> None:
    """Refuse what cannot be staged.

    Raises:
        CheckpointValueError: with the path of the first sparse, quantised, meta or sub-byte tensor.
    """
    for tensor, place in zip(tensors, places, strict=True):
        problem, way_out = _problem(tensor)
        if problem:
            raise CheckpointValueError(
                f"{join(*place) or 'the tree'}: cannot store a {problem} tensor; the way out: {way_out}"
            )


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


def _unique_name(place: tuple[str, object], taken: dict[str, Entry]) -> str:
    # JSON cannot hold lone surrogates; the tree keeps the exact key, the name is for people.
    wanted = join(*place).encode("utf-8", "replace").decode() or "tensor"
    name, number = wanted, 2
    while name in taken or name in RESERVED:
        name, number = f"{wanted}#{number}", number + 1
    return name
