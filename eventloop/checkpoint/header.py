"""The header of a checkpoint file: safetensors' own, with two tensors more.

A file is ``u64 header length | JSON header | data``. The data are the user's tensors, widest elements first (so that
each is aligned without holes, which safetensors forbids), then ``__tree__`` (see `tree`), then ``__digest__``: the
CRC-32 of every byte before it. The order of the names in the header is the order of the data.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import orjson
import torch

from eventloop.checkpoint.bounds import MAX_TREE_BYTES, elements
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
_FOREIGN: Final = (
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
FOREIGN_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _FOREIGN if hasattr(torch, name)}
FOREIGN_NAMES: Final = {dtype: name for name, dtype in FOREIGN_DTYPES.items()}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class NewerError(Exception):
    """A file says that it needs a newer program than this; or a bit of it has flipped."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of the header: its dtype by safetensors' name, its shape, and its bytes within the data."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class Foreign(msgspec.Struct, frozen=True, array_like=True):
    """What the tree knows about a tensor whose dtype safetensors lacks."""

    dtype: str
    shape: tuple[_Size, ...]


class Header(msgspec.Struct, frozen=True):
    """A header that was read and found sound: every entry in the order of the data, without holes."""

    version: int
    entries: dict[str, TensorInfo]
    bytes: int


def render_start(entries: dict[str, TensorInfo]) -> bytes:
    """The JSON of the user's tensors: the part of a header that stays the same while the set of tensors does.

    Raises:
        CheckpointValueError: there are too many tensors for safetensors.
    """
    metadata = {"format": FORMAT, "version": str(VERSION), "digest": "crc32"}
    plain = {name: msgspec.structs.asdict(entry) for name, entry in entries.items()}
    start = orjson.dumps({METADATA: metadata, **plain})[:-1]
    if len(start) > MAX_HEADER_BYTES - 1000:
        raise CheckpointValueError(f"{len(entries):,} tensors need a header of {len(start):,} bytes; 100 MB is the limit")
    return start


def render(start: bytes, data_bytes: int, tree_bytes: int) -> bytes:
    """The whole header, its length included, padded with spaces so that the data begin at a multiple of 8.

    Raises:
        CheckpointValueError: the tree is too large.
    """
    if tree_bytes > MAX_TREE_BYTES:
        raise CheckpointValueError(
            "more than 4 GB of arrays, bytes and text in all; the way out: torch.from_numpy(...) of the arrays"
        )
    tree_end = data_bytes + tree_bytes
    rest = {
        TREE: {"dtype": "U8", "shape": (tree_bytes,), "data_offsets": (data_bytes, tree_end)},
        DIGEST: {"dtype": "U8", "shape": (DIGEST_BYTES,), "data_offsets": (tree_end, tree_end + DIGEST_BYTES)},
    }
    text = b"%b,%b" % (start, orjson.dumps(rest)[1:])
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """The length of the JSON header, from the first 8 bytes of a file.

    Raises:
        CheckpointDamagedError: the file is too short for it, or the length is absurd.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or length > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CheckpointDamagedError(f"{file_bytes} bytes cannot hold a header of {length} bytes")
    return length


def parse(text: bytes, data_bytes: int) -> Header:
    """Read the JSON header and check all that it promises about the data.

    Raises:
        CheckpointDamagedError: not ours, or in contradiction with itself or the file's size.
        NewerError: of a newer version.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, b"{}"), type=dict[str, str])
        version = _version(metadata)
        entries = {name: msgspec.json.decode(entry, type=TensorInfo) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"the header cannot be read: {error}") from error
    _check_entries(entries, data_bytes)
    return Header(version, entries, LENGTH_BYTES + len(text))


def foreign_dtype(name: str) -> torch.dtype:
    """Return a dtype of `FOREIGN_DTYPES`; raises NewerError where torch lacks it."""
    if name not in FOREIGN_DTYPES:
        raise NewerError(f"it holds a tensor of dtype {name[:60]!r}, which torch {torch.__version__} lacks; upgrade torch")
    return FOREIGN_DTYPES[name]


def _version(metadata: dict[str, str]) -> int:
    if metadata.get("format") != FORMAT:
        raise CheckpointDamagedError("no checkpoint of trainbus (its header does not say so)")
    text = metadata.get("version", "")
    if not (text.isascii() and text.isdigit()) or metadata.get("digest") != "crc32":
        raise CheckpointDamagedError(f"the header names version {text!r} and digest {metadata.get('digest')!r}")
    if int(text[:9]) > VERSION:
        raise NewerError(f"it has format version {text}, this trainbus reads up to {VERSION}; upgrade trainbus")
    return int(text)


def _check_entries(entries: dict[str, TensorInfo], data_bytes: int) -> None:
    end = 0
    for name, entry in entries.items():
        dtype = SAFE_DTYPES.get(entry.dtype)
        begin, after = entry.data_offsets
        if dtype is None or begin != end or after - begin != elements(entry.shape, after - begin) * dtype.itemsize:
            raise CheckpointDamagedError(f"the header contradicts itself at {name!r}")
        end = after
    if end != data_bytes:
        raise CheckpointDamagedError(f"the header promises {end} bytes of data, the file has {data_bytes}")
    _check_last(list(entries)[-2:], entries)
    begin, after = entries[TREE].data_offsets
    if after - begin > MAX_TREE_BYTES:
        raise CheckpointDamagedError(f"the header promises a tree of {after - begin:,} bytes; {MAX_TREE_BYTES:,} are the most")


def _check_last(last: Sequence[str], entries: dict[str, TensorInfo]) -> None:
    if last != [TREE, DIGEST] or entries[DIGEST].shape != (DIGEST_BYTES,) or entries[DIGEST].dtype != "U8":
        raise CheckpointDamagedError("the header does not end with the tree and the digest")
