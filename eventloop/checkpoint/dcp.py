"""Open folders of ``torch.distributed.checkpoint`` (DCP), as torchtitan, FSDP2 and Accelerate write them; none of it is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import torch

from trainbus.eventloop.checkpoint.contents import Contents, Place
from trainbus.eventloop.checkpoint.dcp_metadata import METADATA, read_metadata
from trainbus.eventloop.checkpoint.load import LEGACY, ZIP, read_exactly
from trainbus.eventloop.checkpoint.objects import ObjectParts
from trainbus.eventloop.checkpoint.pieces import Keys
from trainbus.eventloop.checkpoint.pth import load_pickled
from trainbus.eventloop.checkpoint.rebuild import check_packed, unflatten
from trainbus.eventloop.checkpoint.shards import Indexed, Piece, naming_damage
from trainbus.eventloop.checkpoint.store import AnyPath, open_file
from trainbus.eventloop.errors import CheckpointDamagedError

OURS: Final = "trainbus"
"""Key under which ``write_dcp`` keeps what only a checkpoint of ours has."""
TREE: Final = "tree"
_SMALL: Final = 4096


def is_dcp(directory: AnyPath) -> bool:
    """Return True for a folder with an index of DCP."""
    return (directory / METADATA).exists()


def open_dcp(*directories: AnyPath) -> Contents:
    """Open a DCP folder; its tree is what was saved, or the checkpoint that ``write_dcp`` made it from.

    Of several folders the trees, which are dicts, become one. Objects are read as ``load_pth`` does; entries that are no file
    of ``torch.save`` are bytes. Tensors without dimensions (step counts) are read at once.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        CheckpointDamagedError: it, or an entry, is damaged.
        CheckpointError: it, or an entry, names code, or was written by an extension.
    """
    contents = Contents()
    trees = [_tree(contents, directory) for directory in directories]
    contents.tree = trees[0] if len(trees) == 1 else {key: value for tree in trees for key, value in tree.items()}
    return contents


def _tree(contents: Contents, directory: AnyPath) -> Any:
    index = read_metadata(directory)
    ours = index.objects.get(f"{OURS}.{TREE}")
    if ours is None:
        return _nested(index.paths, dict(_values(contents, directory, index.tensors, index.objects)))
    packed = _read_object(directory, ours, f"{OURS}.{TREE}")
    with naming_damage(directory / ours.file):
        check_packed(memoryview(packed))
        return contents.resolve(unflatten(msgspec.Raw(packed), iter(()), ObjectParts), directory, index.tensors)


def _values(
    contents: Contents, directory: AnyPath, tensors: Mapping[str, Indexed], objects: Mapping[str, Piece]
) -> Iterator[tuple[str, Any]]:
    tied: dict[Any, torch.Tensor] = {}
    for name, one in tensors.items():
        key = (one.dtype, one.shape, *one.pieces) if one.pieces else name
        if key not in tied:
            empty = contents.add(Place(name, directory, one))
            tied[key] = empty if one.shape else contents.read(empty)
        yield name, tied[key]
    same: dict[bytes, Any] = {}
    for name, piece in objects.items():
        yield name, _read_object(directory, piece, name, same)


def _read_object(directory: AnyPath, piece: Piece, name: str, same: dict[bytes, Any] | None = None) -> Any:
    """Read an object; small ones with the same bytes once, as torchtitan has the options of a group for each parameter."""
    path = directory / piece.file
    with open_file(path) as (file, _):
        file.seek(piece.begin)
        data = bytes(read_exactly(file, piece.bytes))
    if same is not None and data in same:
        return same[data]
    value = load_pickled(data, f"{path} at {name!r}") if data[:4] in (ZIP, LEGACY) else data
    if same is not None and len(data) <= _SMALL:
        same[data] = value
    return value


def _nested(paths: Mapping[str, Keys], values: Mapping[str, Any]) -> Any:
    """Return the dicts and lists in which the values were."""
    root: dict[str | int, Any] = {}
    for name, path in paths.items():
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if type(inner) is not dict:
                raise CheckpointDamagedError(f"the path of {name!r} leads through another value")
        if path[-1] in inner:
            raise CheckpointDamagedError(f"two values have the path of {name!r}")
        inner[path[-1]] = values[name]
    return _with_lists(root)


def _with_lists(value: Any) -> Any:
    """Numbers as keys were the places in a list."""
    if type(value) is not dict:
        return value
    made = {key: _with_lists(each) for key, each in value.items()}
    if not made or any(type(key) is str for key in made):
        return made
    return [made[key] for key in sorted(made)]
