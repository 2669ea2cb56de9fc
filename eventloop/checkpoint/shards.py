"""The directory with the sharded tensors of a checkpoint, beside its file: its index, its digests, its removal.

The index is JSON, in place of the pickle that torch writes. ``sharded`` writes and reads the tensors; it is apart because
``torch.distributed.checkpoint`` takes a second to import, and most runs never need it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch

from eventloop.checkpoint.commit import CHUNK, TEMPORARY_PREFIX, crc32, failing, readable
from eventloop.checkpoint.container import elements
from eventloop.checkpoint.load import file_kind, outline
from eventloop.checkpoint.rebuild import DTYPES
from eventloop.checkpoint.store import file_size, is_plain_name, read_small
from eventloop.errors import CheckpointDamagedError, CheckpointError
from eventloop.log import get_logger

SHARDS: Final = "shards"
"""Key of the tree under which the directory is named."""
SUFFIX: Final = ".shards"
DIGESTS: Final = "digests.json"
INDEX: Final = "index.json"
MAX_INDEX_BYTES: Final = 1 << 30

_NAME: Final = re.compile(rf".+-[0-9a-f]{{8}}{re.escape(SUFFIX)}", re.DOTALL)
"""Names of directories: the name of the file, and a token."""
_PART: Final = re.compile(
    rf"__\d+_\d+\.distcp|{re.escape(INDEX)}|(\d+|index)\.{re.escape(DIGESTS)}|{re.escape(TEMPORARY_PREFIX)}.+\.tmp"
)
"""Names of the files in them."""

log = get_logger()

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


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True if parameters of ``model`` are spread over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without that import no parameter is sharded
    return tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters())


def has_shards(state: object) -> bool:
    """Return True if the tree of a checkpoint names a directory with sharded tensors."""
    return isinstance(state, Mapping) and SHARDS in state


def shards_of(state: Mapping[str, Any], path: Path) -> Path:
    """Return the directory with the sharded tensors of the checkpoint ``path``, which must be beside it."""
    name = state[SHARDS]
    if not (is_plain_name(name) and name.endswith(SUFFIX)):
        raise CheckpointDamagedError(f"{name!r} does not name a directory with sharded tensors beside it")
    directory = path.with_name(name)
    if directory.is_symlink():
        raise CheckpointDamagedError(f"{directory} is a link, which is not followed")
    return directory


def read_index(directory: Path) -> dict[str, Indexed]:
    """Read the index of a directory, and check it against itself and the sizes of the files there."""
    path = directory / INDEX
    try:
        index = msgspec.json.decode(read_small(path, MAX_INDEX_BYTES), type=dict[str, Indexed])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    names = {piece.file for piece in all_pieces(index)}
    for name in names:
        if not is_plain_name(name):
            raise CheckpointDamagedError(f"{path} names {name!r}, which is not a file of that directory")
    sizes = {name: file_size(directory / name) for name in names}
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


def _is_sound(tensor: Indexed, sizes: dict[str, int]) -> bool:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return False
    held = 0
    for piece in tensor.pieces:
        count = elements(piece.shape, piece.bytes)
        inside = len(piece.offsets) == len(piece.shape) == len(tensor.shape) and all(
            offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.shape, tensor.shape, strict=True)
        )
        if not inside or count * dtype.itemsize > piece.bytes or piece.begin + piece.bytes > sizes[piece.file]:
            return False
        held += count
    return elements(tensor.shape, held) == held


def verify_shards(state: Any, path: object) -> None:
    """Read the sharded tensors of a checkpoint once, if it has any, and compare their digests.

    Raises:
        CheckpointDamagedError: a part is missing or damaged.
    """
    if not has_shards(state):
        return
    file = Path(str(path))
    with naming_damage(file):
        directory = shards_of(state, file)
        wanted: dict[str, str] = {}
        for digests in directory.glob(f"*.{DIGESTS}"):
            wanted |= msgspec.json.decode(read_small(digests, MAX_INDEX_BYTES), type=dict[str, str])
        if INDEX not in wanted:
            raise CheckpointDamagedError(f"{directory} is not complete")
        if unknown := {piece.file for piece in all_pieces(read_index(directory))} - wanted.keys():
            raise CheckpointDamagedError(f"{directory} has no digests of {', '.join(sorted(unknown))}")
        for name, digest in wanted.items():
            if not is_plain_name(name):
                raise CheckpointDamagedError(f"{directory} has a digest of {name!r}, which is not a file of it")
            file_size(directory / name)  # it is a regular file
            if digest_of(directory / name) != digest:
                raise CheckpointDamagedError(f"{directory / name} has other bytes than were written")


def sweep_shards(directory: Path, *, still: float = 60.0) -> bool:
    """Remove directories of sharded tensors that no checkpoint in ``directory`` names; return True if there were any at all.

    A checkpoint counts under any name, also one such as ``epoch_1.bak``.

    Only a directory that ``sharded`` has named and filled is one. One that has changed in the last ``still`` seconds is being
    written, and stays. Each removal is logged.

    Raises:
        CheckpointError: a directory cannot be removed.
    """
    found = {one: parts for one in directory.glob(f"*{SUFFIX}") if (parts := _own_parts(one))}
    if not found:
        return False
    named = set()
    for file in directory.iterdir():
        try:
            if file.suffix != ".safetensors" and (not file.is_file() or file_kind(file) != "checkpoint"):
                continue
            tree = outline(file)
        except (CheckpointError, OSError):
            return True  # it may name any of them
        named.add(str(tree[SHARDS]) if has_shards(tree) else "")
    for one, parts in found.items():
        if one.name not in named and time.time() - one.stat().st_mtime >= still:
            with failing(f"cannot remove {one}"):
                for part in parts:
                    part.unlink(missing_ok=True)
                one.rmdir()  # which fails if something else has come into it
            log.info("removed the sharded tensors of a checkpoint that does not exist", path=str(one))
    return True


def _own_parts(directory: Path) -> list[Path]:
    """Return the files in a directory if its name and all its files are of ``sharded``, tensors last; else an empty list."""
    if not _NAME.fullmatch(directory.name) or directory.is_symlink() or not directory.is_dir():
        return []
    parts = sorted(directory.iterdir(), key=_has_tensors)  # so that what is left after a kill is still known
    own = all(_PART.fullmatch(one.name) and one.is_file() and not one.is_symlink() for one in parts)
    return parts if own and any(map(_has_tensors, parts)) else []


def _has_tensors(part: Path) -> bool:
    return part.suffix == ".distcp"


def digest_of(file: Path) -> str:
    """Return the digest of a file, and make the file durable."""
    with file.open("rb", buffering=0) as opened:
        crc = crc32(iter(lambda: opened.read(CHUNK), b""))
        os.fsync(opened.fileno())
    return readable(crc)


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Report every error of reading sharded tensors as damage to the checkpoint ``path``."""
    try:
        yield
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error}") from error
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, msgspec.MsgspecError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: its sharded tensors cannot be read ({error})") from error
