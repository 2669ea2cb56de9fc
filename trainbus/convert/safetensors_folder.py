"""Folders of plain safetensors files: Hugging Face's models, and what DCP's ``HuggingFaceStorageWriter`` writes.

Source: https://huggingface.co/docs/safetensors/index#format, and ``torch/distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import torch

from trainbus.convert.contents import Contents, Place
from trainbus.convert.export import safetensors_file
from trainbus.eventloop.checkpoint import container
from trainbus.eventloop.checkpoint.commit import commit_file, failing, temporary_name
from trainbus.eventloop.checkpoint.container import LENGTH_BYTES, TensorInfo
from trainbus.eventloop.checkpoint.dtypes import SAFE_DTYPES
from trainbus.eventloop.checkpoint.folder import commit_folder, discard_folder
from trainbus.eventloop.checkpoint.header import read_exactly
from trainbus.eventloop.checkpoint.scores import Score, as_metadata
from trainbus.eventloop.checkpoint.shards import Indexed, Piece, is_sound, naming_damage
from trainbus.eventloop.checkpoint.store import AnyPath, commit_bytes, is_plain_name, list_files, open_file
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.seams import Seam

INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
_WITH_CONFIG: Final = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")
_SUFFIX: Final = ".safetensors"
_OFFSETS: Final = "DCP_SHARDING_INFO"
_MAX_BYTES: Final = 1 << 30
FILE: Final = Seam(5 << 30)
"""Bytes of a file, unless a tensor is larger."""


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


def write_safetensors(
    weights: Mapping[str, torch.Tensor],
    contents: Contents,
    folder: Path,
    config: Path,
    scores: Mapping[str, Score] | None = None,
) -> None:
    """Write weights durably as a folder that ``from_pretrained`` of Hugging Face's transformers opens.

    Args:
        weights: a ``state_dict`` with tensors of ``contents``. Tied weights are stored under each of their names.
        contents: the checkpoint.
        folder: the new folder. One of that name is replaced; if it has files of another origin, it is kept as ``former-…``.
        config: the model's ``config.json``, or a folder with it; the files of a tokenizer there are copied, too.
        scores: those of the checkpoint, for the metadata of the files.

    Raises:
        CheckpointDamagedError: a tensor cannot be read.
        CheckpointValueError: safetensors cannot hold a tensor.
        CheckpointError: the folder cannot be written, or ``config`` is missing.
    """
    source = config / CONFIG if config.is_dir() else config
    if not source.is_file():
        raise CheckpointError(f"{source}: no such file; model.config.save_pretrained(FOLDER) writes it")
    temporary = Path(temporary_name(str(folder.parent)))
    try:
        with failing(f"cannot write {folder}"):
            temporary.mkdir()
            shutil.copyfile(source, temporary / CONFIG)
            if config.is_dir():
                for file in chain.from_iterable(map(config.glob, _WITH_CONFIG)):
                    shutil.copyfile(file, temporary / file.name)
        _write_files(weights, contents, temporary, as_metadata(scores or {}))
        commit_folder(temporary, folder, replace=True)
    finally:
        discard_folder(temporary)


def _write_files(weights: Mapping[str, torch.Tensor], contents: Contents, folder: Path, metadata: Mapping[str, str]) -> None:
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if files[-1] and size + tensor.nbytes > FILE.value:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    several = len(files) > 1
    names = [
        f"model-{number:05}-of-{len(files):05}{_SUFFIX}" if several else f"model{_SUFFIX}" for number, _ in enumerate(files, 1)
    ]
    for name, tensors in zip(names, files, strict=True):
        size, fill = safetensors_file(tensors, metadata, contents.read)
        commit_file(folder / name, size, fill)
    if several:
        total = sum(tensor.nbytes for tensor in weights.values())
        where = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
        commit_bytes(
            folder / INDEX, orjson.dumps({"metadata": {"total_size": total}, "weight_map": where}, option=orjson.OPT_INDENT_2)
        )
