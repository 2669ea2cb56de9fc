"""Write folders of ``torch.distributed.checkpoint`` (DCP) by its own writer, with one group of tensors in memory at a time.

DCP's writer keeps the tensors of a file until the file is complete. So each group is a file, as if a rank had written it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainbus.convert.contents import Contents, replace_tensors
from trainbus.convert.dcp import OURS, TREE
from trainbus.eventloop.checkpoint.commit import failing, temporary_name
from trainbus.eventloop.checkpoint.folder import commit_folder, discard_folder
from trainbus.eventloop.checkpoint.pieces import Box
from trainbus.eventloop.checkpoint.scores import Score
from trainbus.eventloop.checkpoint.tree import packed
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError
from trainbus.eventloop.seams import Seam

GROUP: Final = Seam(16 << 20)
"""Bytes of a group, unless a tensor's piece is larger: else 20,000 small tensors would be as many files."""
_INLINE: Final = 64 << 10
"""Bytes of a tensor up to which it stays in the packed tree, if it is in no other entry."""


def write_dcp(state: Mapping[str, Any], contents: Contents, folder: Path, scores: Mapping[str, Score] | None = None) -> None:
    """Write tensors and values durably as a folder that ``torch.distributed.checkpoint.load`` opens.

    The pieces of sharded tensors stay pieces. Tied tensors are stored once, under each of their names. An entry ``trainbus``
    has what only the checkpoint has, so that ``open_dcp`` makes the same one of it again.

    Args:
        state: nested dicts and lists, with tensors of ``contents`` or others.
        contents: the checkpoint.
        folder: the new folder. One of that name is replaced; if it has files of another origin, it is kept as ``former-…``.
        scores: those of the checkpoint, for that entry.

    Raises:
        CheckpointDamagedError: a tensor cannot be read.
        CheckpointValueError: for a value that only a pickle holds, with its name.
        CheckpointError: the folder cannot be written, or two values would have one name.
    """
    temporary = Path(temporary_name(str(folder.parent)))
    try:
        with failing(f"cannot write {folder}"):
            _write(_with_ours(state, contents, scores or {}), contents, temporary)
        commit_folder(temporary, folder, replace=True)
    except ValueError as error:  # of torch, which makes flat names of nested ones
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        discard_folder(temporary)


def _with_ours(state: Mapping[str, Any], contents: Contents, scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the state with an entry for what it lacks of the checkpoint: its tree, in which tensors are names in the state."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state))
    for name, value in planner.state_dict.items():
        if isinstance(value, ObjectParts):
            raise CheckpointValueError(f"{name}: a folder of DCP would pickle this {value.type}; export a .pth file instead")
    names = {id(value): name for name, value in reversed(planner.state_dict.items()) if isinstance(value, torch.Tensor)}
    further: dict[str, torch.Tensor] = {}

    def mark(path: str, tensor: torch.Tensor) -> Any:
        if id(tensor) not in names:
            if tensor.nbytes <= _INLINE:
                return contents.read(tensor)
            while path in further:
                path += "'"
            further[path] = tensor
            names[id(tensor)] = f"{OURS}.tensors.{path}"
        return contents.mark(names[id(tensor)], tensor)

    tree = packed(replace_tensors(contents.tree, mark))
    return {**state, OURS: {TREE: tree, "tensors": further, "scores": dict(scores)}}


def _write(state: dict[str, Any], contents: Contents, folder: Path) -> None:
    planner = _Planner(contents)
    planner.set_up_planner(state, is_coordinator=True)
    writer = FileSystemWriter(folder)
    writer.reset()
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    first: dict[int, str] = {}  # the name under which a tensor is stored
    stored: list[WriteItem] = []
    tied: list[WriteItem] = []
    for item in plan.items:
        value = planner.state_dict[item.index.fqn]
        name = first.setdefault(id(value), item.index.fqn) if isinstance(value, torch.Tensor) else item.index.fqn
        (stored if name == item.index.fqn else tied).extend(_pieces(item, value, contents))
    plans = [dataclasses.replace(plan, items=items, planner_data={}) for items in (*_groups(stored), tied)]
    plans[0] = dataclasses.replace(plans[0], planner_data=plan.planner_data)
    plans, metadata = planner.create_global_plan(plans)
    results = [writer.write_data(one, planner).value() for one in writer.prepare_global_plan(plans[:-1])]
    written = {result.index: result for group in results for result in group}
    for item in plans[-1].items:
        name = first[id(planner.state_dict[item.index.fqn])]
        same = written[MetadataIndex(name, item.index.offset)]
        results[0].append(dataclasses.replace(same, index=item.index))
    writer.finish(metadata, results)


class _Planner(DefaultSavePlanner):
    """Reads each piece of a tensor when it is to be written."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._contents = contents

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.state_dict[write_item.index.fqn]
        if write_item.tensor_data is None:
            data: io.BytesIO = self.transform_object(write_item, value)
            return data
        chunk = write_item.tensor_data.chunk
        return self._contents.read(value, Box(tuple(chunk.offsets), tuple(chunk.sizes)))


def _pieces(item: WriteItem, value: Any, contents: Contents) -> list[WriteItem]:
    if item.tensor_data is None or len(boxes := contents.boxes(value)) == 1:
        return [item]
    return [
        WriteItem(
            MetadataIndex(item.index.fqn, box.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)),
                item.tensor_data.properties,
                item.tensor_data.size,
            ),
        )
        for box in boxes
    ]


def _groups(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    group: list[WriteItem] = []
    held = 0
    for item in items:
        data = item.tensor_data
        size = 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if group and held + size > GROUP.value:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    yield group
