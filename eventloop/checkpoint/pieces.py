"""Read boxes of tensors whose pieces are in several files: ours, or those of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch

from trainbus.eventloop.checkpoint.header import read_exactly
from trainbus.eventloop.checkpoint.pickled import load_pickled
from trainbus.eventloop.checkpoint.rebuild import DTYPES
from trainbus.eventloop.checkpoint.shards import OLD_PART, Indexed, Piece
from trainbus.eventloop.checkpoint.store import AnyPath, open_file
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

Keys = tuple[str | int, ...]
"""The way to a value in the tree."""


class Box(NamedTuple):
    """A part of a tensor: where it begins, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class ReadTarget(NamedTuple):
    """A tensor to read into, and its place in the whole one."""

    name: str
    tensor: torch.Tensor
    box: Box


def read_box(directory: AnyPath, indexed: Indexed, name: str, box: Box | None = None) -> torch.Tensor:
    """Return a tensor, or the part of it in ``box``, from the files in ``directory``; ``name`` is for errors.

    Raises:
        CheckpointDamagedError: a piece is missing, or is another than the index says.
    """
    box = box or Box((0,) * len(indexed.shape), indexed.shape)
    if found := [piece for piece in indexed.pieces if piece.bytes and (piece.offsets, piece.shape) == box]:
        with open_file(directory / found[0].file) as (file, _):  # without a copy
            return _piece(file, found[0], DTYPES[indexed.dtype])
    target = ReadTarget(name, torch.empty(box.shape, dtype=DTYPES[indexed.dtype]), box)
    missing = target.tensor.numel()
    for piece in indexed.pieces:
        if shared_box(Box(piece.offsets, piece.shape), box) is not None:
            with open_file(directory / piece.file) as (file, _):
                missing -= fill(target, file, piece)
    if missing:
        raise CheckpointDamagedError(f"the parts do not make up {name!r}")
    return target.tensor


def fill(target: ReadTarget, file: BinaryIO, piece: Piece) -> int:
    """Read what a piece and a target share; return the number of elements."""
    shared = shared_box(Box(piece.offsets, piece.shape), target.box)
    assert shared is not None  # noqa: S101 - see _read
    first = 0
    if piece.file.endswith(OLD_PART):
        source = _read_old(file, piece, target.tensor.dtype)
    else:
        # Rows that lie side by side are read alone: with FSDP2 that is all that another number of processes needs.
        rows, row = (piece.shape[0], piece.bytes // piece.shape[0]) if piece.shape else (1, piece.bytes)
        if shared.shape[1:] == piece.shape[1:] and piece.shape:
            first, rows = shared.offsets[0] - piece.offsets[0], shared.shape[0]
        file.seek(piece.begin + first * row)
        read = torch.frombuffer(read_exactly(file, rows * row), dtype=target.tensor.dtype)
        source = read.view(rows, *piece.shape[1:]) if piece.shape else read.view(())
    begin = (piece.offsets[0] + first, *piece.offsets[1:]) if piece.shape else ()
    _slice(target.tensor, target.box.offsets, shared).copy_(_slice(source, begin, shared))
    return torch.Size(shared.shape).numel()


def _piece(file: BinaryIO, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    if piece.file.endswith(OLD_PART):
        return _read_old(file, piece, dtype)
    file.seek(piece.begin)
    return torch.frombuffer(read_exactly(file, piece.bytes), dtype=dtype).view(piece.shape)


def _slice(tensor: torch.Tensor, begin: tuple[int, ...], part: Box) -> torch.Tensor:
    """Return the ``part`` of a whole tensor that this one, which begins at ``begin``, has a part of."""
    ranges = zip(part.offsets, part.shape, begin, strict=True)
    return tensor[tuple(slice(offset - start, offset - start + size) for offset, size, start in ranges)]


def shared_box(one: Box, other: Box) -> Box | None:
    """Return the box that is in both; None if there is none."""
    begin = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True))
    shape = tuple(end - start for end, start in zip(ends, begin, strict=True))
    return Box(begin, shape) if all(size > 0 for size in shape) else None


def _read_old(file: BinaryIO, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """Read a piece that ``torch.distributed.checkpoint`` wrote: a file of ``torch.save`` within the file."""
    file.seek(piece.begin)
    data = file.read(piece.bytes)  # bytes, of which BytesIO makes no copy
    if len(data) < piece.bytes:
        raise CheckpointDamagedError("the file ended while it was being read")
    try:
        tensor = load_pickled(data, piece.file)
    except CheckpointDamagedError:
        raise
    except CheckpointError as error:  # it names code, which that never writes there
        raise CheckpointDamagedError(str(error)) from error
    plain = (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    )
    if not plain or (tuple(tensor.shape), tensor.dtype) != (piece.shape, dtype):
        raise ValueError(f"{piece.file} has another tensor than the index says")
    found: torch.Tensor = tensor.detach()
    return found


def mapped(value: Any, chosen: Callable[[Any], bool], make: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    """Return a copy of dicts, lists and tuples in which ``make`` has replaced each ``chosen`` value."""
    if chosen(value):
        return make(keys, value)
    if isinstance(value, dict):
        made = {key: mapped(each, chosen, make, (*keys, key)) for key, each in value.items()}
        if type(value) is dict:
            return made
        if all(made[key] is value[key] for key in value):
            return value
        kept = copy.copy(value)
        dict.update(kept, made)  # not the update() of a Counter, which adds
        return kept
    if type(value) is ObjectParts:
        return ObjectParts(value.type, mapped(value.content, chosen, make, keys))
    if type(value) in (list, tuple):
        return type(value)(mapped(each, chosen, make, (*keys, index)) for index, each in enumerate(value))
    return value
