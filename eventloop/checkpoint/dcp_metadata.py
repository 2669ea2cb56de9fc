"""Read the index of a folder of ``torch.distributed.checkpoint`` (DCP): its file ``.metadata``, without running any of it.

That file is a pickle. The only names in it that are looked up are those of DCP's own records, and each of them is a class that
keeps what the pickle gives it. A pickle that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from trainbus.eventloop.checkpoint.container import DTYPES
from trainbus.eventloop.checkpoint.pieces import Keys
from trainbus.eventloop.checkpoint.shards import Indexed, Piece, check_index
from trainbus.eventloop.checkpoint.store import AnyPath, is_plain_name, open_file
from trainbus.eventloop.checkpoint.tree import MAX_DEPTH
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

METADATA: Final = ".metadata"
_MAX_BYTES: Final = 1 << 32


class DcpIndex(NamedTuple):
    """What a folder holds, by DCP's flat names."""

    tensors: dict[str, Indexed]
    objects: dict[str, Piece]
    """Where the bytes of each other value are."""
    paths: dict[str, Keys]
    """The way to each value in the nested dicts and lists that were saved, in the order in which they were."""


class _Record:
    """A placeholder for an object in the pickle: the arguments of its construction, and its state."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Self:
        self = object.__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


class _Chunk(_Record): ...


class _Properties(_Record): ...


class _Index(_Record): ...


class _Storage(_Record): ...


class _Other(_Record):
    """A value that is not needed."""


_RECORDS: Final[dict[str, type]] = {
    "torch.distributed.checkpoint.metadata.Metadata": _Metadata,
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata": _Tensor,
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata": _Bytes,
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": _Chunk,
    "torch.distributed.checkpoint.metadata.TensorProperties": _Properties,
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _Properties,  # before torch 2.3
    "torch.distributed.checkpoint.metadata.MetadataIndex": _Index,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Storage,
    "torch.distributed.checkpoint.metadata.StorageMeta": _Other,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _Other,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _Other,
    "torch.serialization._get_layout": _Other,
    "pathlib.PosixPath": _Other,
    "pathlib.WindowsPath": _Other,
    "pathlib._local.PosixPath": _Other,  # Python 3.13
    "pathlib._local.WindowsPath": _Other,
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: AnyPath) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        found = _RECORDS.get(f"{module}.{name}")
        if found is None:
            raise CheckpointError(
                f"{self._path} names code, which may do anything when it is run, so it is not: {module}.{name}; only what "
                "torch.distributed.checkpoint itself writes there is read"
            )
        return found


def read_metadata(directory: AnyPath) -> DcpIndex:
    """Read the index of a DCP folder, and check it against itself and the sizes of the files there.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        CheckpointDamagedError: it cannot be read, or contradicts itself or the files.
        CheckpointError: it names code, or the files are compressed or encrypted.
    """
    path = directory / METADATA
    with open_file(path) as (file, size):
        if size > _MAX_BYTES:
            raise CheckpointDamagedError(f"{path} has {size:,} bytes; the limit is {_MAX_BYTES:,}")
        data = file.read()
    try:
        _check_opcodes(data)
        metadata = _Unpickler(data, path).load()
        index = _converted(metadata)
        check_index(index.tensors, directory, path, further=index.objects)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # any: torch did not write this pickle
        raise CheckpointDamagedError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
    return index


def _check_opcodes(data: bytes) -> None:
    """Refuse what would take memory out of proportion, or objects from elsewhere."""
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.startswith("EXT") or (opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > len(data)):
            raise ValueError(f"an opcode {opcode.name} with {argument}")


def _converted(metadata: Any) -> DcpIndex:
    fields = _fields(metadata, _Metadata)
    places = {_key(index): _fields(place, _Storage) for index, place in (fields["storage_data"] or {}).items()}
    tensors: dict[str, Indexed] = {}
    objects: dict[str, Piece] = {}
    for name, entry in fields["state_dict_metadata"].items():
        if type(name) is not str:
            raise TypeError(f"the name of a value is a {type(name).__name__}")
        if isinstance(entry, _Bytes):
            objects[name] = _piece(name, (), (), places[name, None])
        else:
            tensors[name] = _indexed(name, _fields(entry, _Tensor), places)
    paths = dict(_paths(fields.get("planner_data"), tensors | objects))
    return DcpIndex(tensors, objects, paths)


def _indexed(name: str, fields: Mapping[str, Any], places: Mapping[tuple[str, Keys | None], Mapping[str, Any]]) -> Indexed:
    state = fields["properties"].state
    dtype = state[0] if type(state) is tuple else state["dtype"]
    if dtype not in DTYPES.values():
        raise ValueError(f"{name}: no tensor can be of dtype {dtype}")
    pieces = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, _Chunk)
        offsets, sizes = _sizes(box["offsets"]), _sizes(box["sizes"])
        if 0 not in sizes:
            pieces.append(_piece(name, offsets, sizes, places[name, offsets]))
    return Indexed(str(dtype).removeprefix("torch."), _sizes(fields["size"]), pieces)


def _piece(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Mapping[str, Any]) -> Piece:
    if place.get("transform_descriptors"):
        raise CheckpointError(f"{name}: it was written through an extension of DCP (compressed?); save it without extensions")
    file, (begin, length) = place["relative_path"], _sizes((place["offset"], place["length"]))
    if not is_plain_name(file):
        raise ValueError(f"{file!r} is not a file of that directory")
    return Piece(offsets, sizes, file, begin, length)


def _paths(planner_data: Any, names: Mapping[str, Any]) -> Iterator[tuple[str, Keys]]:
    """Yield the names with their paths. A saver that does not flatten its tree leaves none; then the name is the path."""
    given = planner_data if isinstance(planner_data, dict) else {}
    for name in [*(name for name in given if name in names), *(name for name in names if name not in given)]:
        path = given.get(name, (name,))
        if type(path) is not tuple or not 0 < len(path) <= MAX_DEPTH or any(type(key) not in (str, int) for key in path):
            raise TypeError(f"{name}: its path is not a tuple of texts and numbers")
        yield name, path


def _key(index: Any) -> tuple[str, Keys | None]:
    fields = _fields(index, _Index)
    offset = fields.get("offset")
    return fields["fqn"], None if offset is None else _sizes(offset)


def _fields(record: Any, kind: type[_Record]) -> Mapping[str, Any]:
    if type(record) is not kind or not isinstance(record.state, dict | type(None)):
        raise TypeError(f"expected a {kind.__name__.strip('_')}, got a {type(record).__name__.strip('_')}")
    return record.state or {}


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or any(type(each) is not int or not 0 <= each < 2**63 for each in values):
        raise ValueError("sizes or offsets that are no tuple of counts")
    return values
