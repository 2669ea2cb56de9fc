"""Open folders of ``torch.distributed.checkpoint`` (DCP), as torchtitan, FSDP2 and Accelerate write them; none of it is run.

DCP's own readers would: ``FileSystemReader.read_metadata`` and ``DefaultLoadPlanner.load_bytes`` unpickle whatever they find.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import torch

from trainbus.convert.contents import Contents, Place
from trainbus.convert.pth import Placeholder, load_pickled
from trainbus.eventloop.checkpoint.dtypes import DTYPES
from trainbus.eventloop.checkpoint.header import LEGACY, ZIP, read_exactly
from trainbus.eventloop.checkpoint.pieces import Keys
from trainbus.eventloop.checkpoint.rebuild import unflatten
from trainbus.eventloop.checkpoint.shards import Indexed, Piece, check_index, naming_damage
from trainbus.eventloop.checkpoint.store import AnyPath, is_plain_name, open_file
from trainbus.eventloop.checkpoint.unpack import MAX_DEPTH, ObjectParts, check_packed
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

OURS: Final = "trainbus"
"""Key under which ``write_dcp`` keeps what only a checkpoint of ours has."""
TREE: Final = "tree"
_METADATA: Final = ".metadata"
_SMALL: Final = 4096


class _Index(NamedTuple):
    """What a folder holds, by DCP's flat names."""

    tensors: dict[str, Indexed]
    objects: dict[str, Piece]
    """Where the bytes of each other value are."""
    paths: dict[str, Annotated[Keys, msgspec.Meta(min_length=1, max_length=MAX_DEPTH)]]
    """The way to each value in the nested dicts and lists that were saved, in the order in which they were."""


def is_dcp(directory: AnyPath) -> bool:
    """Return True for a folder with an index of DCP."""
    return (directory / _METADATA).exists()


def check_dcp(directory: AnyPath) -> None:
    """Compare a folder's index with itself and the sizes of its files.

    Raises:
        FileNotFoundError: there is no ``.metadata``, or a file is missing.
        CheckpointDamagedError: they contradict each other.
        CheckpointError: ``.metadata`` names code, or was written by an extension.
    """
    _read_index(directory)


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
    index = _read_index(directory)
    ours = index.objects.get(f"{OURS}.{TREE}")
    if ours is None:
        return _nested(index.paths, dict(_values(contents, directory, index)))
    packed = _read_object(directory, ours, f"{OURS}.{TREE}")
    with naming_damage(directory / ours.file):
        check_packed(memoryview(packed))
        return contents.resolve(unflatten(msgspec.Raw(packed), iter(()), ObjectParts), directory, index.tensors)


# ---------------------------------------------------------------------------------------------------------------- index

_DCP: Final = "torch.distributed.checkpoint"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_BYTES: Final = f"{_DCP}.metadata.BytesStorageMetadata"
_RECORDS: Final = frozenset(
    {
        *(f"{_DCP}.metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"{_DCP}.metadata.TensorProperties", f"{_DCP}.metadata._MEM_FORMAT_ENCODING"),
        *(f"{_SHARDED}.TensorProperties", f"{_SHARDED}.MEM_FORMAT_ENCODING"),  # before torch 2.3
        *(f"{_DCP}.filesystem._StorageInfo", "torch.serialization._get_layout"),
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    }
)
"""What DCP itself writes into ``.metadata``, beside shapes and dtypes."""
_PLAIN: Final = {"torch.Size": tuple, "collections.OrderedDict": dict}


class _Unpickler(pickle.Unpickler):
    """Read ``.metadata``, a pickle, with placeholders for DCP's records.

    Each call makes new classes of them, because a pickle can set attributes of a class.
    """

    def __init__(self, data: bytes, path: AnyPath) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _RECORDS:
            return Placeholder.kind(full)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full in _PLAIN:
            return _PLAIN[full]
        raise CheckpointError(
            f"{self._path} names code, which may do anything when it is run, so it is not: {full}; only what "
            "torch.distributed.checkpoint itself writes there is read"
        )


def _read_index(directory: AnyPath) -> _Index:
    """Read ``.metadata``, and check it against itself and the sizes of the files there."""
    path = directory / _METADATA
    with open_file(path) as (file, _):
        data = file.read()
    try:
        index = _index(_Unpickler(data, path).load())
        check_index(index.tensors, directory, path, further=index.objects)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # any: torch did not write this pickle
        raise CheckpointDamagedError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
    return index


def _index(metadata: Placeholder) -> _Index:
    fields = metadata.state
    places = {(index.state["fqn"], index.state.get("offset")): place.state for index, place in fields["storage_data"].items()}
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, entry in fields["state_dict_metadata"].items():
        if entry.name == _BYTES:
            objects[name] = _piece(name, (), (), places[name, None])
            continue
        boxes = [(one.state["offsets"], one.state["sizes"]) for one in entry.state["chunks"]]
        pieces = [_piece(name, begin, shape, places[name, begin]) for begin, shape in boxes if 0 not in shape]
        dtype = str(entry.state["properties"].state[0]).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": entry.state["size"], "pieces": pieces}
    # A saver that does not flatten its tree leaves no paths; then the name is the path.
    given, known = fields.get("planner_data"), tensors | objects
    paths = {name: path for name, path in given.items() if name in known} if isinstance(given, dict) else {}
    return msgspec.convert((tensors, objects, paths | {name: (name,) for name in known if name not in paths}), _Index)


def _piece(name: str, begin: tuple[int, ...], shape: tuple[int, ...], place: Mapping[str, Any]) -> dict[str, Any]:
    if place.get("transform_descriptors"):
        raise CheckpointError(f"{name}: it was written through an extension of DCP (compressed?); save it without extensions")
    if not is_plain_name(file := place["relative_path"]):
        raise ValueError(f"{file!r} is not a file of that directory")
    return {"offsets": begin, "shape": shape, "file": file, "begin": place["offset"], "bytes": place["length"]}


# --------------------------------------------------------------------------------------------------------------- values


def _values(contents: Contents, directory: AnyPath, index: _Index) -> Iterator[tuple[str, Any]]:
    tied: dict[Any, torch.Tensor] = {}
    for name, one in index.tensors.items():
        key = (one.dtype, one.shape, *one.pieces) if one.pieces else name
        if key not in tied:
            empty = contents.add(Place(name, directory, one))
            tied[key] = empty if one.shape else contents.read(empty)
        yield name, tied[key]
    same: dict[bytes, Any] = {}
    for name, piece in index.objects.items():
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
