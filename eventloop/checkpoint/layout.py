"""Lay out the tensors of a tree in the buffer and in the file; computed once while the set of tensors stays the same.

Whether they are still those of the layout is checked at every save, for 20,000 tensors perhaps. So the check looks at each one
as rarely as it can, and makes nothing that the garbage collector tracks. Of tensors that are joined it leaves to the copy what
that refuses by itself: other shapes, and in grad mode tensors that require a gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import orjson
import torch

from trainbus.eventloop.checkpoint.commit import DIGEST_BYTES
from trainbus.eventloop.checkpoint.container import (
    DIGEST,
    LENGTH_BYTES,
    MAX_TREE_BYTES,
    TREE,
    ForeignInfo,
    TensorInfo,
    render_start,
    unique_name,
)
from trainbus.eventloop.checkpoint.dtypes import FOREIGN_NAMES, SAFE_NAMES
from trainbus.eventloop.checkpoint.forms import (
    check_storable,
    in_tree,
    is_exact,
    kind_of,
    needs_grad,
    strides_to_keep,
    with_strides,
)
from trainbus.eventloop.checkpoint.tree import FlatTree
from trainbus.eventloop.device import any_asynchronous, any_elsewhere
from trainbus.eventloop.errors import CheckpointValueError
from trainbus.eventloop.privates import foreach_copy_

_BATCH: Final = 1024
"""Tensors per batch: many, since each call gives the GIL away once; few enough that what was copied is still in the
processor's cache when its pointers are read, and that two threads have equal shares."""

_JOIN_FROM: Final = 16
"""Number of tensors from which a separate call pays (10 µs) against a share of the common call (1 µs a tensor)."""
_JOIN_UP_TO: Final = 1 << 18
"""Bytes per tensor up to which one ``torch.cat`` is faster than as many copies (20,000 of 4 KB: 16 ms instead of 35)."""

_pack: Final = msgspec.msgpack.Encoder().encode


_dtype: Final = attrgetter("dtype")
Tensors = Sequence[torch.Tensor]
Join = Callable[..., torch.Tensor]


class Changed(Exception):  # noqa: N818 - not an error: it asks for a new layout
    """The tensors differ from the layout."""


class Batch(NamedTuple):
    """Tensors that lie side by side in the file and are copied by one call."""

    start: int
    """Position of the first one in the order of the file."""
    stop: int
    pick: Callable[[Tensors], tuple[torch.Tensor, ...]]
    """Picks them from all tensors of a tree."""
    join: Join | None
    """``torch.stack``, ``torch.cat`` or None: how to copy them by one call; by themselves without one."""
    shape: tuple[int, ...]
    """Of what ``join`` makes."""
    exact: bool
    """Strides and ``requires_grad`` are compared one by one. Else all are contiguous, and none needs a gradient."""
    form: list[Any]
    pointers: list[int]

    def check(self, sources: Tensors, *, joins: bool = True) -> None:
        """Raise Changed if tensors differ from the layout; with ``joins``, in a way that ``copy`` will not report."""
        if _form(sources, self.join, exact=self.exact) != self.form:
            raise Changed
        if self.exact:
            return
        if sources[0].dim() > 1 and not all(map(torch.Tensor.is_contiguous, sources)):
            raise Changed
        if not (joins and not torch.is_inference_mode_enabled()) and any(map(needs_grad, sources)):
            raise Changed

    def copy(self, sources: Tensors, target: Any) -> None:
        """Copy tensors into their views, or joined into one."""
        if self.join is None:
            foreach_copy_(target, sources)  # type: ignore[arg-type]  # a picker makes tuples
            return
        with torch.set_grad_enabled(not self.exact):  # an ``out=`` that would need a gradient is a RuntimeError
            self.join(sources, out=target)

    def moved(self, sources: Tensors) -> bool:
        """Return whether tensors are at other addresses. Ask after the copy: it fetches from memory what this reads."""
        return _pointers(sources) != self.pointers


class Pair(NamedTuple):
    """A tensor, and the staging memory for it."""

    target: torch.Tensor
    source: torch.Tensor
    position: int
    """In the order of the file."""


def by_device(pairs: Iterable[Pair]) -> dict[torch.device, list[Pair]]:
    """Group pairs by the device of their source."""
    groups: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.source.device, []).append(pair)
    return groups


def copy(pairs: Sequence[Pair], *, non_blocking: bool = False) -> None:
    """Copy the sources of one device."""
    foreach_copy_([pair.target for pair in pairs], [pair.source for pair in pairs], non_blocking=non_blocking)


class Layout:
    """Offsets, names and the first part of the header for one set of tensors, all of which can be staged."""

    def __init__(self, flat: FlatTree) -> None:
        check_storable(flat.tensors, flat.path)
        tensors = flat.tensors
        self._paths = (flat.parents, flat.keys, flat.parameters)
        self._originals = _originals(tensors)
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._empty = [(index, shape) for index, shape in enumerate(self._shapes) if 0 in shape]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._exact = [tensor.requires_grad or is_exact(tensor) for tensor in tensors]
        #: The staged tensors in the order of the file: widest elements first, so that each one is aligned; then tensors
        #: that can be joined side by side.
        self.order = sorted(
            (index for index, original in enumerate(self._originals) if index == original),
            key=lambda index: (-self._dtypes[index].itemsize, str(self._dtypes[index]), self._row(index)),
        )
        self.batches = list(self._batches(tensors))
        # The tensors that begin at the address of another: aliases of it, or not, by their form alone.
        counts = Counter(map(torch.Tensor.data_ptr, tensors))
        self._pick_neighbours = _picker([i for i, tensor in enumerate(tensors) if (at := tensor.data_ptr()) and counts[at] > 1])
        self._neighbours = self._facts_of_neighbours(tensors)
        #: Whether there are tensors on other devices than the CPU.
        self.elsewhere = any_elsewhere(tensors)
        #: Whether there are tensors on asynchronous devices, which are copied faster, and without waiting, into pinned memory.
        self.pinned = self.elsewhere and any_asynchronous(tensors)
        self._describe(flat)

    def _describe(self, flat: FlatTree) -> None:
        """Make the parts of the header and of the packed tree that stay the same."""
        infos: dict[str, TensorInfo] = {}
        foreign: dict[int, ForeignInfo] = {}
        strides: dict[int, tuple[int, ...]] = {}
        self.bytes = 0
        for rank, index in enumerate(self.order):
            shape, dtype = self._shapes[index], self._dtypes[index]
            begin, self.bytes = self.bytes, self.bytes + math.prod(shape) * dtype.itemsize
            stored = shape
            if dtype not in SAFE_NAMES:
                stored, foreign[rank] = (self.bytes - begin,), ForeignInfo(FOREIGN_NAMES[dtype], shape)
            if (kept := strides_to_keep(flat.tensors[index])) is not None:
                strides[rank] = kept
            name = unique_name(flat.path(index), infos)
            infos[name] = TensorInfo(SAFE_NAMES.get(dtype, "U8"), stored, (begin, self.bytes))
        self._start = render_start(infos)
        ranks = {index: rank for rank, index in enumerate(self.order)}
        #: For each tensor of the tree, the position of its copy in the order of the file.
        self.slots = [ranks[original] for original in self._originals]
        self.packed_slots = msgspec.Raw(_pack(self.slots))
        self._strides = strides
        self._kinds = {index: kind for index, tensor in enumerate(flat.tensors) if (kind := kind_of(tensor))}
        self.packed_foreign = msgspec.Raw(_pack(foreign))
        self.packed_forms = msgspec.Raw(_pack(strides)), msgspec.Raw(_pack(self._kinds))

    def header(self, tree_bytes: int) -> bytes:
        """Return the whole header with its length, padded with spaces so that the data begin at a multiple of 8."""
        if tree_bytes > MAX_TREE_BYTES:
            raise CheckpointValueError(
                "more than 4 GB of arrays, bytes and text in all; store arrays as tensors, by torch.from_numpy(...)"
            )
        tree_end = self.bytes + tree_bytes
        rest = {
            TREE: {"dtype": "U8", "shape": (tree_bytes,), "data_offsets": (self.bytes, tree_end)},
            DIGEST: {"dtype": "U8", "shape": (DIGEST_BYTES,), "data_offsets": (tree_end, tree_end + DIGEST_BYTES)},
        }
        return with_length(b"%b,%b" % (self._start, orjson.dumps(rest)[1:]))

    def check(self, flat: FlatTree) -> None:
        """Raise Changed if another tree has other paths, or other shapes of empty tensors.

        This, ``Batch.check`` and ``check_aliases`` run at every save (see ``batch``). Only the shapes of empty tensors are
        compared: two others with as many dimensions and elements are equal, or not broadcastable, and then the copy raises.
        Of tensors that are joined the shape of the first is compared; the others agree with it, or the copy raises.
        ``torch.cat`` joins tensors of different lengths, so their elements are counted, too.
        """
        if (flat.parents, flat.keys, flat.parameters) != self._paths:
            raise Changed
        if any(tuple(flat.tensors[index].shape) != shape for index, shape in self._empty):
            raise Changed

    def check_aliases(self, tensors: Tensors, *, moved: bool) -> None:
        """Raise Changed if other tensors are aliases, or all are on the CPU now, or no longer; ``moved``: if any moved."""
        form, pointers, strides = self._facts_of_neighbours(tensors)
        expected_form, expected_pointers, expected_strides = self._neighbours
        if form != expected_form:
            raise Changed
        # If no tensor moved, the aliases are the same.
        if moved or pointers != expected_pointers:
            if _originals(tensors) != self._originals or any_elsewhere(tensors) != self.elsewhere:
                raise Changed
        elif strides != expected_strides:
            raise Changed  # a weight was tied to another, and now it is that one transposed

    def _facts_of_neighbours(self, tensors: Tensors) -> tuple[list[Any], list[int], list[Any]]:
        neighbours = self._pick_neighbours(tensors)
        return _form(neighbours, None, exact=True), _pointers(neighbours), list(map(_strided, neighbours))

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of ``memory`` (flat, uint8) per staged tensor, in the order of the file."""
        views: list[torch.Tensor] = []
        end = 0
        for dtype, group in groupby(self.order, key=self._dtypes.__getitem__):
            shapes = [self._shapes[index] for index in group]
            sizes = [math.prod(shape) for shape in shapes]
            begin, end = end, end + sum(sizes) * dtype.itemsize
            # One split per dtype: slicing the buffer for each of 20,000 tensors takes three times as long.
            parts = memory[begin:end].view(dtype).split_with_sizes(sizes)
            views += [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return views

    def formed(self, views: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the tensors of the tree as they were, from the views of their copies."""
        return in_tree(self.slots, self._kinds, [with_strides(one, self._strides.get(rank)) for rank, one in enumerate(views)])

    def _row(self, index: int) -> tuple[int, ...]:
        """Return the facts that tensors must share to be joined: how they are checked, their dimensions, all but the first."""
        shape = self._shapes[index]
        return (self._exact[index], len(shape), *shape[1:])

    def _batches(self, tensors: Tensors) -> Iterator[Batch]:
        end = 0
        for joined, members in self._runs():
            for first in range(0, len(members), _BATCH):
                part = members[first : first + _BATCH]
                join, shape = self._join(part) if joined else (None, ())
                pick = _picker(part)
                sources = pick(tensors)
                start, end = end, end + len(part)
                exact = join is None or self._exact[part[0]]
                yield Batch(start, end, pick, join, shape, exact, _form(sources, join, exact=exact), _pointers(sources))

    def _join(self, part: list[int]) -> tuple[Join, tuple[int, ...]]:
        shapes = [self._shapes[index] for index in part]
        if len(set(shapes)) == 1:
            return torch.stack, (len(part), *shapes[0])
        return torch.cat, (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _runs(self) -> Iterator[tuple[bool, list[int]]]:
        """Divide the order of the file into runs of tensors that are joined, and runs of others."""
        others: list[int] = []
        for (dtype, _), group in groupby(self.order, key=lambda index: (self._dtypes[index], self._row(index))):
            members = list(group)
            largest = max(math.prod(self._shapes[index]) for index in members) * dtype.itemsize
            if len(members) < _JOIN_FROM or not 0 < largest <= _JOIN_UP_TO or dtype not in SAFE_NAMES:
                others += members
                continue
            yield from [(False, others), (True, members)]
            others = []
        yield False, others


def _picker(indices: Sequence[int]) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda tensors: tuple(tensors[index] for index in indices)


def _originals(tensors: Tensors) -> list[int]:
    """Return for each tensor the index of the first one that is the same memory in the same form."""
    pointers = list(map(torch.Tensor.data_ptr, tensors))
    if len(set(pointers)) == len(pointers):
        return list(range(len(pointers)))
    originals: list[int] = []
    seen: dict[int, list[int]] = {}
    for index, pointer in enumerate(pointers):
        same = seen.setdefault(pointer, [])
        original = next((other for other in same if _is_alias(tensors[other], tensors[index])), index)
        if original == index and pointer:  # every empty tensor is at address 0, but is separate
            same.append(index)
        originals.append(original)
    return originals


def _strided(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], bool, bool]:
    return tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and one.device == other.device and _strided(one) == _strided(other))


def _form(tensors: Tensors, join: Join | None, *, exact: bool) -> list[Any]:
    """Return the facts of all tensors, one after the other, without running Python for each tensor."""
    further = [*map(torch.Tensor.stride, tensors), *map(needs_grad, tensors)] if exact else []
    if join is None:
        return [*map(_dtype, tensors), *map(torch.Tensor.numel, tensors), *map(torch.Tensor.dim, tensors), *further]
    first = tuple(tensors[0].shape)
    if join is torch.stack:  # which wants all of them to have that shape
        return [first, *map(_dtype, tensors), *further]
    return [first[1:], *map(_dtype, tensors), *map(torch.Tensor.numel, tensors), *further]


def _pointers(tensors: Tensors) -> list[int]:
    """Return the addresses of all tensors."""
    return list(map(torch.Tensor.data_ptr, tensors))


def with_length(text: bytes) -> bytes:
    """Return a JSON header as it stands in a file: after its length, and padded with spaces to a multiple of 8."""
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
