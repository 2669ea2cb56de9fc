"""The tree of a checkpoint without the data of its tensors, which are read one by one: for files larger than the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trainbus.eventloop.checkpoint.forms import contiguous_strides, kind_of, strides_to_keep, with_kind, with_strides
from trainbus.eventloop.checkpoint.header import verify
from trainbus.eventloop.checkpoint.marks import mark
from trainbus.eventloop.checkpoint.pieces import Box, Keys, mapped, read_box
from trainbus.eventloop.checkpoint.reading import outline_placed
from trainbus.eventloop.checkpoint.rebuild import DTYPES, unflatten
from trainbus.eventloop.checkpoint.shards import (
    MARK,
    SHARDS,
    Indexed,
    Piece,
    naming_damage,
    read_shards,
    sharded_in,
    verify_shards,
)
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path
from trainbus.eventloop.checkpoint.tree import FlatTree
from trainbus.eventloop.checkpoint.unpack import ObjectParts


class Place(NamedTuple):
    """Where the data of a tensor are."""

    name: str
    directory: AnyPath
    indexed: Indexed
    strides: Sequence[int] | None = None
    """None if it is unknown in which order its dimensions were in memory."""


class Contents:
    """A tree with an empty tensor, on the device ``meta``, for each one of a checkpoint. Tied tensors are one."""

    def __init__(self) -> None:
        self.tree: Any = None
        self._places: dict[int, tuple[torch.Tensor, Place]] = {}  # the tensors, so that their ids stay theirs

    def add(self, place: Place, tensor: torch.Tensor | None = None, kind: int = 0) -> torch.Tensor:
        """Return an empty tensor of a kind (see ``forms``), or ``tensor``, that stands for the one at ``place``.

        Raises:
            CheckpointDamagedError: there can be no tensor of that shape.
        """
        made = tensor
        if made is None:
            with naming_damage(place.directory):  # torch refuses some shapes without elements
                strides = contiguous_strides(place.indexed.shape) if place.strides is None else place.strides
                dtype = DTYPES[place.indexed.dtype]
                made = torch.empty_strided(place.indexed.shape, strides, dtype=dtype, device="meta")
                made = with_kind(made, kind)
        self._places[id(made)] = made, place
        return made

    def resolve(self, tree: Any, directory: AnyPath, index: Mapping[str, Indexed]) -> Any:
        """Return a tree with an empty tensor for each mark of a tensor that is in ``directory``.

        Raises:
            ValueError: the tree and the index do not agree.
        """
        tied: dict[Any, torch.Tensor] = {}

        def stand_in(_: Keys, found: Mapping[str, Any]) -> torch.Tensor:
            name, one = found[MARK], index[found[MARK]]
            if (list(one.shape), one.dtype) != (found["shape"], found["dtype"]):
                raise ValueError(f"the tree and the index do not agree on {name!r}")
            kind = found.get("kind", 0)
            key = (one.dtype, one.shape, kind, *one.pieces) if one.pieces else name
            if key not in tied:
                tied[key] = self.add(Place(name, directory, one, found.get("strides")), kind=kind)
            return tied[key]

        return mapped(tree, lambda value: isinstance(value, Mapping) and MARK in value, stand_in)

    def mark(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """Return what stands for a tensor of the tree in a tree with sharded tensors."""
        place = self._places.get(id(tensor))
        ordered = place is None or place[1].strides is not None
        return mark(name, tensor, tensor if ordered else None)

    def boxes(self, tensor: torch.Tensor) -> list[Box]:
        """Return the parts in which a tensor is stored; one for a tensor without elements."""
        place = self._places.get(id(tensor))
        pieces = [] if place is None else place[1].indexed.pieces
        return [Box(piece.offsets, piece.shape) for piece in pieces] or [Box((0,) * tensor.dim(), tuple(tensor.shape))]

    def read(self, tensor: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        """Return a tensor of the tree with its data, or the part of it in ``box``; one with data is returned as it is.

        Raises:
            CheckpointDamagedError: the data cannot be read.
        """
        if not tensor.is_meta:
            return tensor
        _, place = self._places[id(tensor)]
        with naming_damage(place.directory), torch.no_grad():
            read = read_box(place.directory, place.indexed, place.name, box)
            if box is not None:
                return read
            return with_kind(with_strides(read, strides_to_keep(tensor)), kind_of(tensor))


def open_contents(path: AsPath) -> Contents:
    """Open a checkpoint of ours, a file with or without sharded tensors beside it, and verify it.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: the file or a part beside it is damaged.
    """
    path = as_path(path)
    verify(path)
    contents = Contents()
    tree, placed = outline_placed(path)
    for tensor, begin in placed:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        piece = Piece((0,) * len(shape), shape, path.name, begin, tensor.numel() * tensor.itemsize)
        contents.add(Place(f"the tensor at {begin}", path.parent, Indexed(dtype, shape, [piece]), tensor.stride()), tensor)
    if sharded_in(tree) is not None:
        verify_shards(tree, path)
        with naming_damage(path):
            directory, index = read_shards(tree, path)
            tree = contents.resolve({key: value for key, value in tree.items() if key != SHARDS}, directory, index)
    contents.tree = tree
    return contents


def replace_tensors(tree: Any, make: Callable[[str, torch.Tensor], Any]) -> Any:
    """Return a copy of a tree with ``make(dotted path, tensor)`` for each tensor; a tied one is given each time."""
    flat = FlatTree(tree)
    return unflatten(flat.rest, (make(flat.path(number), tensor) for number, tensor in enumerate(flat.tensors)), ObjectParts)
