"""Reading checkpoints. Everything is verified; whatever is wrong with a file is a `CheckpointDamagedError`."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, BinaryIO, Final

import msgspec
import numpy as np
import torch

from eventloop.checkpoint.bounds import check_memory, elements
from eventloop.checkpoint.digest import CHUNK, Digest, readable
from eventloop.checkpoint.header import (
    DIGEST,
    DIGEST_BYTES,
    LENGTH_BYTES,
    SAFE_DTYPES,
    TREE,
    Foreign,
    Header,
    NewerError,
    TensorInfo,
    foreign_dtype,
    header_bytes,
    parse,
)
from eventloop.checkpoint.packed import check_packed
from eventloop.checkpoint.rebuild import unflatten
from eventloop.checkpoint.store import AnyPath, as_path, store_of
from eventloop.errors import CheckpointDamagedError, CheckpointError

_Path = str | os.PathLike[str] | AnyPath
_Data = np.ndarray[tuple[int], np.dtype[np.uint8]]
_OWN: Final = (TREE, DIGEST)


class CheckpointInfo(msgspec.Struct, frozen=True):
    """What a checkpoint file says about itself. Sizes and offsets are in bytes."""

    path: AnyPath
    bytes: int
    version: int
    digest: str
    tensors: dict[str, TensorInfo]
    """By dotted path; a dtype that safetensors lacks is described as the U8 it is stored as."""


class _Body(msgspec.Struct, array_like=True):
    slots: list[Annotated[int, msgspec.Meta(ge=0)]]
    foreign: dict[int, Foreign]
    tree: msgspec.Raw


def load(path: _Path, map_location: str | torch.device = "cpu") -> Any:
    """Read and verify a checkpoint, and rebuild the tree.

    The file is read once into one buffer, of which the tensors are parts (each with a storage of its own): the buffer
    lives as long as one of them does.

    Args:
        path: the file, or its URL.
        map_location: the device for all tensors.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: the bytes are not those that were written, or not those of a checkpoint.
        CheckpointError: a newer trainbus or torch wrote it.
    """
    device = torch.device(map_location)
    with _opened(path) as (file, size):
        header, digest = _read_header(file, size)
        check_memory(size)
        data = np.empty(size - header.bytes, np.uint8)
        _read_into(file, data.data, digest)
        _check_digest(digest, data[-DIGEST_BYTES:].tobytes())
        with _rebuilding():
            start, end = header.entries[TREE].data_offsets
            body = _body(data[start:end].data)
            parts = _tensors(header, data, body.foreign)
        tensors = [part.to(device) for part in parts]
        with _rebuilding():
            return unflatten(body.tree, (tensors[slot] for slot in body.slots))


def verify(path: _Path) -> None:
    """Read a checkpoint through a small buffer and check its header and every byte.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: the bytes are not those that were written, or not those of a checkpoint.
        CheckpointError: a newer trainbus or torch wrote it.
    """
    with _opened(path) as (file, size):
        header, digest = _read_header(file, size)
        _check_rest(file, size - header.bytes, digest)


def inspect(path: _Path) -> CheckpointInfo:
    """Describe a checkpoint from its header alone. The data are not read, so damage to them is not seen.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: the header is damaged, or not that of a checkpoint.
        CheckpointError: a newer trainbus wrote it.
    """
    path = as_path(path)
    with _opened(path) as (file, size):
        header, _ = _read_header(file, size)
        file.seek(size - DIGEST_BYTES)
        digest = readable(file.read(DIGEST_BYTES))
    tensors = {name: entry for name, entry in header.entries.items() if name not in _OWN}
    return CheckpointInfo(path, size, header.version, digest, tensors)


def outline(path: _Path) -> Any:
    """Rebuild the tree of a checkpoint with tensors on the device ``meta``: their shapes and dtypes, and none of their data.

    Nothing but the header and the tree is read, so that it is quick for a file of any size; and nothing is verified beyond
    what the header says of the file's length. Tied tensors are one tensor.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: the header or the tree is damaged, or not that of a checkpoint.
        CheckpointError: a newer trainbus or torch wrote it.
    """
    with _opened(path) as (file, size):
        header, _ = _read_header(file, size)
        start, end = header.entries[TREE].data_offsets
        file.seek(header.bytes + start)
        packed = bytearray(end - start)
        _fill(file, memoryview(packed))
        with _rebuilding():
            body = _body(packed)
            forms = [_form(entry, body.foreign.get(rank)) for rank, entry in enumerate(_user_entries(header))]
            tensors = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in forms]
            return unflatten(body.tree, (tensors[slot] for slot in body.slots))


@contextmanager
def _opened(path: _Path) -> Iterator[tuple[BinaryIO, int]]:
    place = as_path(path)
    with store_of(place).opened(place) as (file, size):
        try:
            try:
                yield file, size
            except NewerError as error:  # if not for a bit that has flipped
                _check_all(file, size)
                raise CheckpointError(f"{path} cannot be read here: {error}") from None
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(f"{path} is damaged: {error}") from error.__cause__
        except MemoryError as error:
            raise CheckpointDamagedError(f"{path} is damaged, or too large for the memory of this machine") from error
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise CheckpointDamagedError(f"{path} is damaged: its disk cannot read it ({error})") from error


def _read_header(file: BinaryIO, size: int) -> tuple[Header, Digest]:
    prefix = file.read(LENGTH_BYTES)
    text = bytearray(header_bytes(prefix, size))
    _fill(file, memoryview(text))
    digest = Digest()
    digest.update(prefix)
    digest.update(bytes(text))
    return parse(bytes(text), size - LENGTH_BYTES - len(text)), digest


def _check_all(file: BinaryIO, size: int) -> None:
    file.seek(0)
    _check_rest(file, size, Digest())


def _check_rest(file: BinaryIO, size: int, digest: Digest) -> None:
    """Read on through a small buffer to the end, ``size`` bytes from here, and check the digest."""
    left = size - DIGEST_BYTES
    buffer = memoryview(bytearray(min(left, CHUNK)))
    while left:
        part = buffer[: min(left, CHUNK)]
        _fill(file, part)
        digest.update(part)
        left -= len(part)
    _check_digest(digest, file.read(DIGEST_BYTES))


def _read_into(file: BinaryIO, data: memoryview, digest: Digest) -> None:
    end = len(data) - DIGEST_BYTES
    for start in range(0, end, CHUNK):
        part = data[start : min(start + CHUNK, end)]
        _fill(file, part)
        digest.update(part)  # while the chunk is still in the processor's cache
    _fill(file, data[end:])


def _fill(file: BinaryIO, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)  # type: ignore[attr-defined]  # typeshed leaves it out of BinaryIO
        if not count:
            raise CheckpointDamagedError("the file ended while it was being read")
        buffer = buffer[count:]


def _check_digest(digest: Digest, stored: bytes) -> None:
    if digest.stored() != stored:
        raise CheckpointDamagedError(f"its bytes give {readable(digest.stored())}, written was {readable(stored)}")


@contextmanager
def _rebuilding() -> Iterator[None]:
    # The digest was right, so this is no damage to the disk but a file that something else wrote in our name.
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error, msgspec.MsgspecError) as error:
        first = str(error).partition("\n")[0][:200]  # torch adds a trace of its own
        raise CheckpointDamagedError(f"the tree cannot be rebuilt ({type(error).__name__}: {first})") from error


def _body(packed: bytearray | memoryview) -> _Body:
    check_packed(memoryview(packed))
    return msgspec.msgpack.decode(packed, type=_Body)


def _user_entries(header: Header) -> list[TensorInfo]:
    return [entry for name, entry in header.entries.items() if name not in _OWN]


def _tensors(header: Header, data: _Data, foreign: dict[int, Foreign]) -> list[torch.Tensor]:
    return [_tensor(data, entry, foreign.get(rank)) for rank, entry in enumerate(_user_entries(header))]


def _form(entry: TensorInfo, foreign: Foreign | None) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = SAFE_DTYPES[entry.dtype] if foreign is None else foreign_dtype(foreign.dtype)
    shape = entry.shape if foreign is None else foreign.shape
    begin, end = entry.data_offsets
    # The header is checked already, not so what the tree says of it.
    if elements(shape, end - begin) * dtype.itemsize != end - begin:
        raise ValueError(f"a {dtype} tensor of {len(shape)} dimensions in {end - begin} bytes")
    return dtype, shape


def _tensor(data: _Data, entry: TensorInfo, foreign: Foreign | None) -> torch.Tensor:
    dtype, shape = _form(entry, foreign)
    begin, end = entry.data_offsets
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    # Not slices of one tensor: those would share a version counter, and an in-place change of one would make autograd
    # refuse the backward of all others.
    return torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin).view(shape)
