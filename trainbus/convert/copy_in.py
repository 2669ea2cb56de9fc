"""Write an opened checkpoint of another program as one of ours, with memory for two of its parts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import torch

from trainbus.convert.contents import Contents, replace_tensors
from trainbus.eventloop.checkpoint import shards
from trainbus.eventloop.checkpoint.pieces import Box, Keys, mapped
from trainbus.eventloop.checkpoint.shards import SHARDS, Indexed, Piece
from trainbus.eventloop.checkpoint.staging import CommitInfo, StageBuffer, save, stage, write
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, list_files, make_directory, remove_directory
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.errors import CheckpointValueError
from trainbus.eventloop.seams import Seam

ONE_FILE: Final = Seam(1 << 30)
"""Bytes of tensors up to which a checkpoint is one file. A larger one is sharded: it never is in memory as a whole, and each
process of a run reads its own part of it."""
PART: Final = Seam(64 << 20)
"""Bytes of a part, unless a tensor's piece is larger."""


def save_contents(contents: Contents, path: AsPath) -> CommitInfo:
    """Write a checkpoint, durably and atomically: one file, or one with sharded tensors beside it (see ``ONE_FILE``).

    Sharded tensors keep the pieces in which they were stored. The result has the size of all files.

    Raises:
        CheckpointDamagedError: tensors cannot be read.
        CheckpointValueError: it holds what a checkpoint of ours cannot.
        CheckpointError: it cannot be written.
    """
    path = as_path(path)
    tensors: dict[int, torch.Tensor] = {}
    replace_tensors(contents.tree, lambda _, tensor: tensors.setdefault(id(tensor), tensor))
    if sum(tensor.nbytes for tensor in tensors.values()) <= ONE_FILE.value:
        read = {key: contents.read(tensor) for key, tensor in tensors.items()}
        return save(replace_tensors(contents.tree, lambda _, tensor: read[id(tensor)]), path)
    if not isinstance(contents.tree, dict):
        raise CheckpointValueError(f"the tree is a {type(contents.tree).__name__}; a sharded checkpoint is a dict")
    directory = path.with_name(f"{path.stem}-{secrets.token_hex(4)}{shards.SHARDS_SUFFIX}")
    try:
        return _save_sharded(contents, path, directory)
    except BaseException:
        remove_directory(directory, [file for file, _ in list_files(directory)])
        raise


def _save_sharded(contents: Contents, path: AnyPath, directory: AnyPath) -> CommitInfo:
    make_directory(directory)
    index: dict[str, Indexed] = {}
    known: dict[int, Indexed] = {}
    wanted: list[tuple[torch.Tensor, Indexed]] = []

    def mark(name: str, tensor: torch.Tensor) -> Any:
        if not tensor.is_meta or not tensor.numel():
            return tensor if not tensor.is_meta else contents.read(tensor)
        while name in index:
            name += "'"
        if id(tensor) not in known:
            dtype = str(tensor.dtype).removeprefix("torch.")
            known[id(tensor)] = Indexed(dtype, tuple(tensor.shape), [])
            wanted.append((tensor, known[id(tensor)]))
        index[name] = known[id(tensor)]
        return contents.mark(name, tensor)

    def with_data(_: Keys, parts: ObjectParts) -> Any:  # a tensor in it is needed when it is put together
        return replace_tensors(parts, lambda _, tensor: contents.read(tensor))

    tree = replace_tensors(mapped(contents.tree, lambda value: isinstance(value, ObjectParts), with_data), mark)
    buffer, size = StageBuffer(), 0
    for number, part in enumerate(_parts(contents, wanted)):
        name = shards.part_name(number)
        staged = stage([contents.read(tensor, box) for tensor, _, box in part], buffer)
        for (tensor, indexed, box), begin in zip(part, staged.offsets(), strict=True):
            indexed.pieces.append(Piece(*box, name, begin, torch.Size(box.shape).numel() * tensor.itemsize))
        size += write(staged, directory / name).bytes
        buffer.clear()
    save(shards.packed_index(index), directory / shards.INDEX)
    make_directory(directory)  # syncs its name
    written = save({**tree, SHARDS: directory.name}, path)
    return msgspec.structs.replace(written, bytes=written.bytes + size)


def _parts(contents: Contents, wanted: list[tuple[torch.Tensor, Indexed]]) -> Iterator[list[tuple[torch.Tensor, Indexed, Box]]]:
    """Divide the pieces of all tensors into parts that are small enough to be in memory twice."""
    part: list[tuple[torch.Tensor, Indexed, Box]] = []
    held = 0
    for tensor, indexed in wanted:
        for box in contents.boxes(tensor):
            size = torch.Size(box.shape).numel() * tensor.itemsize
            if part and held + size > PART.value:
                yield part
                part, held = [], 0
            part.append((tensor, indexed, box))
            held += size
    if part:
        yield part
