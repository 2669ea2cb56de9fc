"""Folders of plain safetensors files: Hugging Face's models, and what DCP's ``HuggingFaceStorageWriter`` writes.

Source: https://huggingface.co/docs/safetensors/index#format, and ``torch/distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from eventloop.checkpoint import container
from eventloop.checkpoint.container import LENGTH_BYTES, SAFE_DTYPES, TensorInfo
from eventloop.checkpoint.contents import Contents, Place
from eventloop.checkpoint.load import read_exactly
from eventloop.checkpoint.shards import Indexed, Piece, is_sound, naming_damage
from eventloop.checkpoint.store import AnyPath, is_plain_name, list_files, open_file
from eventloop.errors import CheckpointDamagedError, CheckpointError

INDEX: Final = "model.safetensors.index.json"
_SUFFIX: Final = ".safetensors"
_OFFSETS: Final = "DCP_SHARDING_INFO"
_MAX_BYTES: Final = 1 << 30


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Saved(msgspec.Struct):
    saved_offsets: tuple[int, ...]


def open_safetensors(directory: AnyPath) -> Contents:
    """Open a folder of safetensors files as a ``state_dict``. Parts that ranks have written become whole tensors.

    Raises:
        CheckpointDamagedError: a file is damaged or missing, or the parts do not make up a tensor.
        CheckpointError: there are no such files, or a dtype that torch lacks.
    """
    found: dict[str, Indexed] = {}
    sizes: dict[str, int] = {}
    for name in _files(directory):
        path = directory / name
        with open_file(path) as (file, size), naming_damage(path):
            prefix = file.read(LENGTH_BYTES)
            header = read_exactly(file, container.header_bytes(prefix, size))
            sizes[name] = size
            for key, dtype, piece in _pieces(name, header):
                known = found.get(key) or Indexed(dtype, (0,) * len(piece.shape), [])
                ends = zip(known.shape, piece.offsets, piece.shape, strict=True)
                shape = tuple(max(before, offset + length) for before, offset, length in ends)
                found[key] = Indexed(dtype, shape, [*known.pieces, *([piece] if piece.bytes else [])])
    if not found:
        raise CheckpointError(f"{directory} has no tensors in .safetensors files")
    contents = Contents()
    contents.tree = {}
    for key, one in sorted(found.items()):
        if not is_sound(one, sizes):
            raise CheckpointDamagedError(f"the files in {directory} contradict themselves at {key!r}, or a part is missing")
        contents.tree[key] = contents.add(Place(key, directory, one))
    return contents


def _files(directory: AnyPath) -> list[str]:
    index = directory / INDEX
    if not index.exists():
        return sorted(path.name for path, _ in list_files(directory) if path.suffix == _SUFFIX and path.name[0] != ".")
    with open_file(index) as (file, size), naming_damage(index):
        if size > _MAX_BYTES:
            raise CheckpointDamagedError(f"it has {size:,} bytes")
        names = set(msgspec.json.decode(file.read(), type=_Index).weight_map.values())
        if strange := [name for name in names if not is_plain_name(name)]:
            raise CheckpointDamagedError(f"it names {strange[0]!r}, which is not a file of that directory")
    return sorted(names)


def _pieces(name: str, header: memoryview) -> Iterator[tuple[str, str, Piece]]:
    metadata, tensors = container.decode(header)
    offsets: Mapping[str, Any] = msgspec.json.decode(metadata.get(_OFFSETS, "{}"), type=dict[str, _Saved])
    for key, text in tensors.items():
        info = msgspec.json.decode(text, type=TensorInfo)
        if info.dtype not in SAFE_DTYPES:
            raise CheckpointError(f"{name}: {key!r} is of dtype {info.dtype[:60]}, which is not supported")
        begin, end = info.data_offsets
        at = offsets[key].saved_offsets if key in offsets else (0,) * len(info.shape)
        dtype = str(SAFE_DTYPES[info.dtype]).removeprefix("torch.")
        yield key, dtype, Piece(at, info.shape, name, LENGTH_BYTES + len(header) + begin, end - begin)
