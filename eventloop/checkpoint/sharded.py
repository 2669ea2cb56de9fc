"""Checkpoints of state that is spread over processes (FSDP2's ``fully_shard``), by ``torch.distributed.checkpoint``.

The tree is one file, as in other checkpoints, with a name in place of each sharded tensor (``DTensor``). The tensors are in
a directory beside it, one file from each process (see ``shards``). Every process writes and syncs its part first; when all
have done so, rank 0 writes the file that names the directory. So a checkpoint exists when every part of it is durable, and
a directory that no file names can be removed (``shards.sweep_shards``).

Tensors are read back with the placement of the reading run: any number of processes, or one that shards nothing.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec
import torch
from torch import distributed
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, distribute_tensor

from eventloop.checkpoint import shards
from eventloop.checkpoint.pth import check_stored
from eventloop.checkpoint.rebuild import DTYPES
from eventloop.checkpoint.shards import INDEX, Indexed, Piece
from eventloop.checkpoint.store import commit_bytes, make_directory
from eventloop.errors import CheckpointError
from eventloop.privates import storage_info

_StorageInfo: Final = storage_info()
_MARK: Final = "__sharded__"
_WHOLE: Final = frozenset({"progress", "data", "rng", "ranks", "stateful", "info"})  # in a run's tree: no weights in them

Keys = tuple[str | int, ...]
"""The way to a value in the tree."""
Like = Callable[[Keys, torch.Size, torch.dtype], torch.Tensor]
"""Makes an empty tensor for a value in the tree, a whole shape and a dtype, with the placement that it has in this run."""


class Parts:
    """The sharded tensors of one checkpoint, copied to the CPU, on their way into a new ``directory``.

    ``group`` has all the processes, and is used for nothing else at the same time; None where there is one without any group.
    """

    def __init__(self, tensors: dict[str, DTensor], directory: Path, group: distributed.ProcessGroup | None) -> None:
        self._tensors: dict[str, Any] = BlockingAsyncStager().stage(tensors)
        self._directory = directory
        self._group = group
        self._rank = 0 if group is None else distributed.get_rank(group)
        self.first = self._rank == 0
        """True on the process that writes the file."""

    def commit(self, write: Callable[[], int]) -> int:
        """Write this process's part, wait for the others', and have rank 0 ``write`` the file; return its result.

        A collective. All processes raise CheckpointError if one of them fails.
        """
        self._agree(lambda: make_directory(self._directory) if self.first else None)  # all processes continue, or none
        self._agree(self._write_parts)
        return int(self._agree(lambda: self._finish(write) if self.first else 0)[0])

    def _write_parts(self) -> None:
        writer = ShardWriter(self._directory, single_file_per_rank=True, sync_files=True)
        save(self._tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        self._tensors = {}
        digests = {file.name: shards.digest_of(file) for file in self._directory.glob(f"__{self._rank}_*.distcp")}
        commit_bytes(self._directory / f"{self._rank}.{shards.DIGESTS}", msgspec.json.encode(digests))  # syncs the directory

    def _finish(self, write: Callable[[], int]) -> int:
        digests = {INDEX: shards.digest_of(self._directory / INDEX)}
        commit_bytes(self._directory / f"index.{shards.DIGESTS}", msgspec.json.encode(digests))
        make_directory(self._directory)  # syncs its name
        return write()

    def _agree(self, do: Callable[[], Any]) -> list[Any]:
        """Call ``do``, and return the results of all processes; raise on all of them if it failed on one."""
        result, problem, cause = None, "", None
        try:
            result = do()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised below, on all ranks
            problem, cause = f"{type(error).__name__}: {error}", error
        outcomes = [(result, problem)]
        if self._group is not None:
            outcomes *= distributed.get_world_size(self._group)
            distributed.all_gather_object(outcomes, (result, problem), group=self._group)
        if failed := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]:
            raise CheckpointError(f"cannot write {self._directory}: {'; '.join(failed)}") from cause
        return [result for result, _ in outcomes]


def take_shards(
    state: dict[str, Any], path: Path, token: str, group: distributed.ProcessGroup | None
) -> tuple[dict[str, Any], Parts]:
    """Return the tree ``state`` with a name in place of each sharded tensor, and those tensors, copied.

    ``token`` is 8 hexadecimal digits that no earlier checkpoint had, the same on all processes; for ``group`` see
    :class:`Parts`.
    """
    tensors: dict[str, DTensor] = {}

    def name(keys: Keys, value: DTensor) -> dict[str, Any]:
        key = ".".join(map(str, keys))
        tensors[key] = value
        return {_MARK: key, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    directory = path.with_name(f"{path.stem}-{token}{shards.SUFFIX}")
    tree = _mapped(state, lambda value: isinstance(value, DTensor), name)
    return {**tree, shards.SHARDS: directory.name}, Parts(tensors, directory, group)


def put_shards(state: Mapping[str, Any], path: Path, like: Like, group: distributed.ProcessGroup | None) -> dict[str, Any]:
    """Return the tree of a loaded checkpoint with its sharded tensors. A collective, unless ``group`` is None.

    ``state`` is the tree loaded from ``path``; ``like`` makes the tensors to read into; ``group`` has the reading processes.
    Raises CheckpointDamagedError.
    """
    tensors: dict[str, torch.Tensor] = {}
    with shards.naming_damage(path), warnings.catch_warnings():
        directory = shards.shards_of(state, path)
        index = shards.read_index(directory)

        def empty(keys: Keys, mark: Mapping[str, Any]) -> torch.Tensor:
            name, shape, dtype = mark[_MARK], mark["shape"], mark["dtype"]
            if name in tensors or (list(index[name].shape), index[name].dtype) != (shape, dtype):
                raise ValueError(f"the file and the index do not agree on {name!r}")
            tensors[name] = made = like(keys, torch.Size(shape), DTYPES[dtype])
            return made

        tree = _mapped(state, lambda value: isinstance(value, Mapping) and _MARK in value, empty)
        try:
            if group is None:
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is meant to be
            load(tensors, storage_reader=ShardReader(directory, index), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # not a subclass of Exception
            raise ValueError(str(error)) from error
    return {key: value for key, value in tree.items() if key != shards.SHARDS}


def spread(state: Mapping[str, Any], like: Like) -> dict[str, Any]:
    """Return the tree of a checkpoint that one process wrote alone, with each tensor sharded as ``like`` makes it."""

    def shard(keys: Keys, value: torch.Tensor) -> torch.Tensor:
        target = like(keys, value.shape, value.dtype)
        if not isinstance(target, DTensor):
            return value
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # all have read it

    def may_be(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0

    return {key: value if key in _WHOLE else _mapped(value, may_be, shard, (key,)) for key, value in state.items()}


def _mapped(value: Any, chosen: Callable[[Any], bool], make: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    """Return a copy of dicts, lists and tuples in which ``make`` has replaced each ``chosen`` value."""
    if chosen(value):
        return make(keys, value)
    if isinstance(value, dict):
        made = {key: _mapped(each, chosen, make, (*keys, key)) for key, each in value.items()}
        return made if type(value) is dict else value if all(made[key] is value[key] for key in value) else made
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, chosen, make, (*keys, index)) for index, each in enumerate(value))
    return value


class ShardWriter(FileSystemWriter):
    """Write a JSON index instead of torch's pickle, which would be executed when it is read."""

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        stored: dict[Any, Any] = {result.index: result.storage_data for of_rank in results for result in of_rank}

        def piece(name: str, chunk: dcp.ChunkStorageMetadata) -> Piece:
            at = stored[dcp.MetadataIndex(name, chunk.offsets)]
            return Piece(tuple(chunk.offsets), tuple(chunk.sizes), at.relative_path, at.offset, at.length)

        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, dcp.TensorStorageMetadata):
                dtype, pieces = str(tensor.properties.dtype), [piece(name, chunk) for chunk in tensor.chunks]
                index[name] = Indexed(dtype.removeprefix("torch."), tuple(tensor.size), pieces)
        commit_bytes(Path(self.path) / INDEX, msgspec.json.encode(index))


class ShardReader(FileSystemReader):
    """Read by the JSON index. It names tensors only, which torch reads with ``weights_only=True``, unlike other objects."""

    def __init__(self, directory: Path, index: Mapping[str, Indexed]) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self) -> dcp.Metadata:
        """Return the index in torch's form. Without ``**kwargs`` torch looks for no other metadata, which it would unpickle."""
        tensors: dict[str, dcp.STORAGE_TYPES] = {
            name: dcp.TensorStorageMetadata(
                dcp.TensorProperties(DTYPES[tensor.dtype]),
                torch.Size(tensor.shape),
                [dcp.ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in tensor.pieces],
            )
            for name, tensor in self._index.items()
        }
        stored = {
            dcp.MetadataIndex(name, piece.offsets): _StorageInfo(piece.file, piece.begin, piece.bytes)
            for name, tensor in self._index.items()
            for piece in tensor.pieces
        }
        return dcp.Metadata(tensors, storage_data=stored)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse pieces that become larger when they are read. Here, since torch 2.11 loses an error of ``read_metadata``."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        for piece in shards.all_pieces(self._index):
            # A zip file may have anything before it; so this view of the file ends where the piece ends.
            with (
                (Path(self.path) / piece.file).open("rb") as file,
                mmap(file.fileno(), piece.begin + piece.bytes, access=ACCESS_READ) as view,
            ):
                archive = zipfile.ZipFile(cast(IO[bytes], view))
                if archive.start_dir < piece.begin:
                    raise ValueError("its list of parts belongs to another file")
                check_stored(archive, piece.bytes)
