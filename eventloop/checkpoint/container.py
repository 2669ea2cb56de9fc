"""The file of a checkpoint: a safetensors file with two tensors more, and the digest that ends it.

It is ``u64 header length | JSON header | data``. The data are the user's tensors, widest elements first (so that each is
aligned without holes, which safetensors forbids), then ``__tree__`` (see ``tree``), then ``__digest__``: the CRC-32 of every
byte before it. The order of the names in the header is the order of the data.

The digest guards against damage (torn writes, flipped bits), not against forgery. Measured on an EPYC core with SHA
extensions: crc32 4.1 GB/s, sha1 1.9, sha256 1.8, blake2b 0.9, md5 0.8; without those extensions sha256 is slower than a disk.
All release the GIL. CRC-32 finds every flipped bit and every burst of up to 32 bits, and misses one in 2**32 others.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

import msgspec
import orjson
import torch

from eventloop.checkpoint.commit import CHUNK, chunks, write_all
from eventloop.errors import CheckpointDamagedError, CheckpointValueError

FORMAT: Final = "trainbus.checkpoint"
VERSION: Final = 1
TREE: Final = "__tree__"
DIGEST: Final = "__digest__"
METADATA: Final = "__metadata__"
RESERVED: Final = frozenset({TREE, DIGEST, METADATA})
DIGEST_BYTES: Final = 4
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses more
MAX_TREE_BYTES: Final = 1 << 32
"""Bytes of everything in a checkpoint except its tensors. MessagePack cannot hold more in one piece."""

# What every safetensors since 0.4.5 reads. Other dtypes are stored as U8, with their dtype and shape in the tree.
SAFE_NAMES: Final[dict[torch.dtype, str]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
SAFE_DTYPES: Final = {name: dtype for dtype, name in SAFE_NAMES.items()}

# Dense dtypes that safetensors, or an older one, lacks. The sub-byte integers are missing: torch cannot copy them.
_FOREIGN: Final = "complex32 complex64 complex128 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
FOREIGN_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in _FOREIGN.split() if hasattr(torch, name)
}
FOREIGN_NAMES: Final = {dtype: name for name, dtype in FOREIGN_DTYPES.items()}

_Size = Annotated[int, msgspec.Meta(ge=0)]
Pieces = tuple[bytes, memoryview, bytes]
"""A file without its digest: header, tensors, tree."""

# Below this, the digest takes no longer than starting a thread and syncing twice.
_ALONE: Final = 8 << 20


class NewerError(Exception):
    """The header names a newer version, because of a newer program or a flipped bit."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of the header: its dtype by safetensors' name, its shape, and its bytes within the data."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class ForeignInfo(msgspec.Struct, frozen=True, array_like=True):
    """The dtype and shape, from the tree, of a tensor whose dtype safetensors lacks."""

    dtype: str
    shape: tuple[_Size, ...]


class Header(msgspec.Struct, frozen=True):
    """A checked header: where the tree is, the user's tensors in the order of the data, and its own length in the file."""

    version: int
    tree: tuple[int, int]
    tensors: dict[str, TensorInfo]
    bytes: int


def elements(shape: Sequence[int], most: int) -> int:
    """Return the number of elements of a shape, or a number above ``most`` where there are more."""
    if 0 in shape:
        return 0
    count = 1  # never much larger than ``most``: to multiply 100,000 dimensions of 9 would take seconds
    for size in shape:
        count *= size
        if count > most:
            return most + 1
    return count


def render_start(tensors: dict[str, TensorInfo]) -> bytes:
    """Return the JSON of the user's tensors: the part of a header that stays the same while the set of tensors does."""
    metadata = {"format": FORMAT, "version": str(VERSION), "digest": "crc32"}
    plain = {name: msgspec.structs.asdict(info) for name, info in tensors.items()}
    start = orjson.dumps({METADATA: metadata, **plain})[:-1]
    if len(start) > MAX_HEADER_BYTES - 1000:
        raise CheckpointValueError(f"{len(tensors):,} tensors need a header of {len(start):,} bytes; 100 MB is the limit")
    return start


def render(start: bytes, data_bytes: int, tree_bytes: int) -> bytes:
    """Return the whole header with its length, padded with spaces so that the data begin at a multiple of 8."""
    if tree_bytes > MAX_TREE_BYTES:
        raise CheckpointValueError(
            "more than 4 GB of arrays, bytes and text in all; store arrays as tensors, by torch.from_numpy(...)"
        )
    tree_end = data_bytes + tree_bytes
    rest = {
        TREE: {"dtype": "U8", "shape": (tree_bytes,), "data_offsets": (data_bytes, tree_end)},
        DIGEST: {"dtype": "U8", "shape": (DIGEST_BYTES,), "data_offsets": (tree_end, tree_end + DIGEST_BYTES)},
    }
    return with_length(b"%b,%b" % (start, orjson.dumps(rest)[1:]))


def with_length(text: bytes) -> bytes:
    """Return a JSON header as it stands in a file: after its length, and padded with spaces to a multiple of 8."""
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """Return the length of the JSON header, from the first 8 bytes of a file."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or length > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CheckpointDamagedError(f"{file_bytes} bytes cannot hold a header of {length} bytes")
    return length


def decode(text: bytes | memoryview) -> tuple[dict[str, str], dict[str, msgspec.Raw]]:
    """Return the metadata and the encoded tensors of the header of any safetensors file."""
    with _decoding():
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(raw.pop(METADATA, b"{}"), type=dict[str, str]), raw


def parse(text: bytes | memoryview, data_bytes: int) -> Header:
    """Read the JSON header of a checkpoint and check all its promises about the data; raise NewerError for a newer version."""
    metadata, raw = decode(text)
    if metadata.get("format") != FORMAT:
        raise CheckpointDamagedError("its header does not name trainbus's format")
    version = metadata.get("version", "")
    if not (version.isascii() and version.isdigit()) or metadata.get("digest") != "crc32":
        raise CheckpointDamagedError(f"the header names version {version!r} and digest {metadata.get('digest')!r}")
    if int(version[:9]) > VERSION:  # before the tensors are decoded: a newer version may describe them in another way
        raise NewerError(f"it has format version {version}, this trainbus reads up to {VERSION}; upgrade trainbus")
    with _decoding():
        tensors = {name: msgspec.json.decode(info, type=TensorInfo) for name, info in raw.items()}
    _check_tensors(tensors, data_bytes)
    del tensors[DIGEST]
    return Header(int(version), tensors.pop(TREE).data_offsets, tensors, LENGTH_BYTES + len(text))


@contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"the header cannot be read: {error}") from error


def _check_tensors(tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    end = 0
    for name, info in tensors.items():
        dtype = SAFE_DTYPES.get(info.dtype)
        begin, after = info.data_offsets
        if dtype is None or begin != end or after - begin != elements(info.shape, after - begin) * dtype.itemsize:
            raise CheckpointDamagedError(f"the header contradicts itself at {name!r}")
        end = after
    if end != data_bytes:
        raise CheckpointDamagedError(f"the header promises {end} bytes of data, but the file has {data_bytes}")
    if list(tensors)[-2:] != [TREE, DIGEST] or (tensors[DIGEST].shape, tensors[DIGEST].dtype) != ((DIGEST_BYTES,), "U8"):
        raise CheckpointDamagedError("the header does not end with the tree and the digest")
    begin, after = tensors[TREE].data_offsets
    if after - begin > MAX_TREE_BYTES:
        raise CheckpointDamagedError(f"the header promises a tree of {after - begin:,} bytes; the limit is {MAX_TREE_BYTES:,}")


def crc32(parts: Iterable[memoryview | bytes], crc: int = 0) -> int:
    """Return the CRC-32 of all parts together, or of what has ``crc`` and the parts."""
    for part in parts:
        for chunk in chunks(part) if len(part) > CHUNK else (part,):
            crc = zlib.crc32(chunk, crc)
    return crc


def readable(crc: int) -> str:
    """Return a digest as text, ``crc32:`` and eight hex digits."""
    return f"crc32:{crc:08x}"


def write_sealed(descriptor: int, pieces: Pieces) -> int:
    """Write the pieces and their digest to a file descriptor; return the digest."""
    if sum(map(len, pieces)) < _ALONE:
        crc = crc32(pieces)
        write_all(descriptor, *pieces, crc.to_bytes(DIGEST_BYTES, "little"))
    else:
        write_all(descriptor, *pieces)
        crc = _digest_during_sync(descriptor, pieces)
        write_all(descriptor, crc.to_bytes(DIGEST_BYTES, "little"))
    return crc


def _digest_during_sync(descriptor: int, pieces: Pieces) -> int:
    # The digest is made while the disk works. Beside the writing it would be one more busy thread, and on few cores the
    # training pays for that. Measured on 800 MB: 0.8 times the seconds, too.
    # The digest has the thread, not the sync: after Ctrl-C, or when the sync fails, this thread need not wait for the other.
    made: list[int] = []
    thread = threading.Thread(target=lambda: made.append(crc32(pieces)), name="trainbus-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down, and the last checkpoint matters most
        return crc32(pieces)
    # Of the data so far; the caller syncs the rest, once the file is complete.
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)
    thread.join()
    return made[0] if made else crc32(pieces)  # if it failed in the thread, this raises its error
