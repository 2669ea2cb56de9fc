"""The file of a checkpoint: a safetensors file with two tensors more, and the digest that ends it.

It is ``u64 header length | JSON header | data``. The data are the user's tensors, widest elements first (so that each is
aligned without holes, which safetensors forbids), then ``__tree__`` (see ``tree``), then ``__digest__``: the CRC-32 of every
byte before it. The order of the names in the header is the order of the data.

It imports no torch, as ``header`` and ``packed``: a command that lists files waits for nothing.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import orjson

from trainbus.eventloop.checkpoint.commit import DIGEST_BYTES
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointValueError
from trainbus.eventloop.user_errors import contextmanager

FORMAT: Final = "trainbus.checkpoint"
VERSION: Final = 2
"""Since 2 the tree has the forms of tensors (see ``forms``), which a reader of 1 would ignore."""
TREE: Final = "__tree__"
DIGEST: Final = "__digest__"
METADATA: Final = "__metadata__"
RESERVED: Final = frozenset({TREE, DIGEST, METADATA})
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses more
MAX_TREE_BYTES: Final = 1 << 32
"""Bytes of everything in a checkpoint except its tensors. MessagePack cannot hold more in one piece."""

SAFE: Final = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
}
"""The dtypes that every safetensors since 0.4.5 reads: its name, and the bytes of an element, by torch's name."""
FOREIGN: Final = {
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Dense dtypes that safetensors, or an older one, lacks: they are stored as U8, with their dtype and shape in the tree.

The sub-byte integers are missing: torch cannot copy them.
"""
ITEM_BYTES: Final = FOREIGN | {name: size for name, (_, size) in SAFE.items()}
"""Bytes of an element, by torch's name of the dtype."""
_SAFE_BYTES: Final = dict(SAFE.values())

_Size = Annotated[int, msgspec.Meta(ge=0)]
Strides = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...]


class NewerError(Exception):
    """The file needs a newer version, or a class that is not imported; or a bit has flipped."""


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
        size = _SAFE_BYTES.get(info.dtype)
        begin, after = info.data_offsets
        if size is None or begin != end or after - begin != elements(info.shape, after - begin) * size:
            raise CheckpointDamagedError(f"the header contradicts itself at {name!r}")
        end = after
    if end != data_bytes:
        raise CheckpointDamagedError(f"the header promises {end} bytes of data, but the file has {data_bytes}")
    if list(tensors)[-2:] != [TREE, DIGEST] or (tensors[DIGEST].shape, tensors[DIGEST].dtype) != ((DIGEST_BYTES,), "U8"):
        raise CheckpointDamagedError("the header does not end with the tree and the digest")
    begin, after = tensors[TREE].data_offsets
    if after - begin > MAX_TREE_BYTES:
        raise CheckpointDamagedError(f"the header promises a tree of {after - begin:,} bytes; the limit is {MAX_TREE_BYTES:,}")


def unique_name(path: str, taken: dict[str, TensorInfo]) -> str:
    """Return the name in the header of a tensor, from its path; for people, as the tree keeps the exact keys."""
    # JSON cannot hold lone surrogates.
    wanted = path.encode("utf-8", "replace").decode() or "tensor"
    name, number = wanted, 2
    while name in taken or name in RESERVED:
        name, number = f"{wanted}#{number}", number + 1
    return name


def render_start(tensors: dict[str, TensorInfo]) -> bytes:
    """Return the JSON of the user's tensors: the part of a header that stays the same while the set of tensors does."""
    metadata = {"format": FORMAT, "version": str(VERSION), "digest": "crc32"}
    plain = {name: msgspec.structs.asdict(info) for name, info in tensors.items()}
    start = orjson.dumps({METADATA: metadata, **plain})[:-1]
    if len(start) > MAX_HEADER_BYTES - 1000:
        raise CheckpointValueError(f"{len(tensors):,} tensors need a header of {len(start):,} bytes; 100 MB is the limit")
    return start
