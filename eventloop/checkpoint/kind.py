"""Telling what a file is, to say something better than that it is damaged."""

from __future__ import annotations

import os
from typing import BinaryIO, Final, Literal

import msgspec

from eventloop.checkpoint.header import FORMAT, LENGTH_BYTES, METADATA, header_bytes
from eventloop.checkpoint.pth import LEGACY, ZIP
from eventloop.checkpoint.store import AnyPath, as_path, store_of
from eventloop.errors import CheckpointDamagedError

Kind = Literal["checkpoint", "plain safetensors", "torch.save", "unknown"]

# What other programs write there. Anything else may be our own name with a bit flipped.
_FOREIGN_FORMATS: Final = frozenset({None, "pt", "np", "numpy", "tf", "flax", "mlx"})


def file_kind(path: str | os.PathLike[str] | AnyPath) -> Kind:
    """What a file is, by its beginning: a checkpoint, weights of another program, or a file of ``torch.save``.

    A damaged checkpoint is one, or unknown; so is what is not a regular file.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: its store does not answer.
    """
    place = as_path(path)
    try:
        with store_of(place).opened(place) as (file, size):
            start = file.read(LENGTH_BYTES)
            if start.startswith((ZIP, LEGACY)):
                return "torch.save"
            return _by_header(file, start, size)
    except CheckpointDamagedError:
        return "unknown"


def _by_header(file: BinaryIO, start: bytes, size: int) -> Kind:
    try:
        text = file.read(header_bytes(start, size))
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.get(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
    except (CheckpointDamagedError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unknown"
    if metadata.get("format") == FORMAT:
        return "checkpoint"
    return "plain safetensors" if metadata.get("format") in _FOREIGN_FORMATS else "unknown"
