"""What is where in the directory of sharded tensors: JSON, in the place of the pickle that torch writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch

from eventloop.checkpoint.bounds import elements, file_size, is_plain_name, read_small
from eventloop.checkpoint.rebuild import DTYPES
from eventloop.errors import CheckpointDamagedError

INDEX: Final = "index.json"
MAX_INDEX_BYTES: Final = 1 << 30

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = tuple[_Size, ...]


class Piece(msgspec.Struct, frozen=True):
    """A part of a tensor: where it begins in the tensor, its shape, and its bytes in a file."""

    offsets: _Shape
    shape: _Shape
    file: str
    begin: _Size
    bytes: _Size


class Indexed(msgspec.Struct, frozen=True):
    """A sharded tensor: its dtype (``"float32"``), its whole shape, and its pieces."""

    dtype: str
    shape: _Shape
    pieces: list[Piece]


def read_index(directory: Path) -> dict[str, Indexed]:
    """Read the index of a directory, and check it against the files there.

    Raises:
        CheckpointDamagedError: it is missing, in contradiction with itself or with the sizes of the files.
    """
    path = directory / INDEX
    try:
        index = msgspec.json.decode(read_small(path, MAX_INDEX_BYTES), type=dict[str, Indexed])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    sizes = _sizes(directory, {piece.file for piece in all_pieces(index)})
    if sum(piece.bytes for piece in all_pieces(index)) > sum(sizes.values()):
        raise CheckpointDamagedError(f"{path} promises more bytes than the files beside it have")
    for name, tensor in index.items():
        if not _is_sound(tensor, sizes):
            raise CheckpointDamagedError(f"{path} contradicts itself or the files beside it at {name!r}")
    return index


def all_pieces(index: Mapping[str, Indexed]) -> Iterator[Piece]:
    """Yield the pieces of all tensors."""
    for tensor in index.values():
        yield from tensor.pieces


def _sizes(directory: Path, names: Iterable[str]) -> dict[str, int]:
    for name in names:
        if not is_plain_name(name):
            raise CheckpointDamagedError(f"{directory / INDEX} names {name!r}, which is not a file of that directory")
    return {name: file_size(directory / name) for name in names}


def _is_sound(tensor: Indexed, sizes: dict[str, int]) -> bool:
    dtype = DTYPES.get(f"torch.{tensor.dtype}")
    held = 0
    for piece in tensor.pieces:
        count = elements(piece.shape, piece.bytes)
        inside = len(piece.offsets) == len(piece.shape) == len(tensor.shape) and all(
            offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.shape, tensor.shape, strict=True)
        )
        if dtype is None or not inside or count * dtype.itemsize > piece.bytes:
            return False
        if piece.begin + piece.bytes > sizes[piece.file]:
            return False
        held += count
    return dtype is not None and elements(tensor.shape, held) == held


def same_form(tensor: Indexed, shape: object, dtype: object) -> bool:
    """Return True if a checkpoint says the same of the form of a tensor as its index."""
    return list(tensor.shape) == shape and tensor.dtype == dtype


def dtype_of(tensor: Indexed) -> torch.dtype:
    """Return the dtype of a tensor of a checked index."""
    return DTYPES[f"torch.{tensor.dtype}"]
