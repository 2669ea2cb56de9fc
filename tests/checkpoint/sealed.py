"""Make files with a right digest around any header and data."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainbus.eventloop.errors import CheckpointDamagedError


def prefixed(header: dict[str, Any] | bytes) -> bytes:
    """A header after its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def seal(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    body = prefixed(header) + data
    return body + zlib.crc32(body).to_bytes(4, "little")


def split(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length : -4]


def header_of(tensors: dict[str, Any], data: int, tree: int) -> dict[str, Any]:
    """The header of a checkpoint with these tensors, and a tree of so many bytes behind their data."""
    end = data + tree
    return {
        "__metadata__": {"format": "trainbus.checkpoint", "version": "1", "digest": "crc32"},
        **tensors,
        "__tree__": {"dtype": "U8", "shape": [tree], "data_offsets": [data, end]},
        "__digest__": {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]},
    }


def assert_refused(
    path: Path, *readers: Callable[[Path], object], match: str | None = None, error: type[Exception] = CheckpointDamagedError
) -> None:
    for read in readers:
        with pytest.raises(error, match=match):
            read(path)


def sealed_tree(tree: bytes, tensor_bytes: int = 0) -> bytes:
    """A file with one U8 tensor and this tree."""
    tensors = {"w": {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}}
    return seal(header_of(tensors, tensor_bytes, len(tree)), bytes(tensor_bytes) + tree)
