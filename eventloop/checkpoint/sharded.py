"""Checkpoints of state that is spread over processes (FSDP2's ``fully_shard``), by ``torch.distributed.checkpoint``.

The tree is one file as ever; in the place of each sharded tensor (``DTensor``) it has a name, and the tensors are in a
directory beside it, one file from each process. The directory is written first and synced by every process; only when all of
them have done so, rank 0 writes the file that names it. So a checkpoint exists when every part of it is durable, and a
directory that no file names is none (``shards.sweep_shards``).

Read back, the tensors have the placement of whoever reads: any number of processes, or one that shards nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from eventloop.checkpoint.commit import commit_bytes, make_directory
from eventloop.checkpoint.shard_index import INDEX, dtype_of, read_index, same_form
from eventloop.checkpoint.shard_storage import ShardReader, ShardWriter
from eventloop.checkpoint.shards import DIGESTS, SHARDS, SUFFIX, digest_of, naming_damage, shards_of
from eventloop.errors import CheckpointError

_MARK: Final = "__sharded__"
_WHOLE: Final = frozenset({"progress", "data", "rng", "ranks", "stateful", "info"})  # in a run's tree: nothing like weights

Path_ = tuple[str | int, ...]
Like = Callable[[Path_, torch.Size, torch.dtype], torch.Tensor]
"""Makes an empty tensor for a place in the tree, a whole shape and a dtype, with the placement that it has here."""


class Parts:
    """The sharded tensors of one checkpoint, copied to the CPU, on their way into a directory.

    Args:
        tensors: by name.
        directory: where to; a new one.
        group: of the processes, used by nothing else at the same time; None where there is one process without any group.
    """

    def __init__(self, tensors: dict[str, DTensor], directory: Path, group: distributed.ProcessGroup | None) -> None:
        self._tensors: dict[str, Any] = BlockingAsyncStager().stage(tensors)
        self._directory = directory
        self._group = group

    @property
    def first(self) -> bool:
        """True on the process that writes the file."""
        return self._group is None or distributed.get_rank(self._group) == 0

    def commit(self, write: Callable[[], int]) -> int:
        """Write this process's part, wait for the others', and have rank 0 ``write`` the file; return what that returned.

        A collective. All processes raise if one of them fails.

        Raises:
            CheckpointError: a part or the file could not be written.
        """
        self._agree(lambda: make_directory(self._directory) if self.first else None)  # each step: nobody goes on alone
        self._agree(self._write_parts)
        return int(self._agree(lambda: self._finish(write) if self.first else 0)[0])

    def _write_parts(self) -> dict[str, str]:
        """Write what is this process's; return the digests of its files by name."""
        rank = 0 if self._group is None else distributed.get_rank(self._group)
        writer = ShardWriter(self._directory, single_file_per_rank=True, sync_files=True)
        save(self._tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        self._tensors = {}
        digests = {file.name: digest_of(file) for file in self._directory.glob(f"__{rank}_*.distcp")}
        commit_bytes(self._directory / f"{rank}.{DIGESTS}", msgspec.json.encode(digests))  # syncs the directory
        return digests

    def _finish(self, write: Callable[[], int]) -> int:
        digests = {INDEX: digest_of(self._directory / INDEX)}
        commit_bytes(self._directory / f"index.{DIGESTS}", msgspec.json.encode(digests))
        make_directory(self._directory)  # syncs its name
        return write()

    def _agree(self, do: Callable[[], Any]) -> list[Any]:
        """Do it, and return the results of all processes; raise on all of them if it failed on one."""
        result: Any = None
        problem, cause = "", None
        try:
            result = do()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised below, on all ranks
            problem, cause = f"{type(error).__name__}: {error}", error
        outcomes = [(result, problem)]
        if self._group is not None:
            outcomes *= distributed.get_world_size(self._group)
            distributed.all_gather_object(outcomes, (result, problem), group=self._group)
        failed = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem]
        if failed:
            raise CheckpointError(f"cannot write {self._directory}: {'; '.join(failed)}") from cause
        return [result for result, _ in outcomes]


def take_shards(
    state: dict[str, Any], path: Path, token: str, group: distributed.ProcessGroup | None
) -> tuple[dict[str, Any], Parts]:
    """Return ``state`` with a name in the place of each sharded tensor, and those tensors, copied.

    Args:
        state: the tree.
        path: of the checkpoint.
        token: that no earlier checkpoint had, the same on all processes.
        group: see :class:`Parts`.
    """
    tensors: dict[str, DTensor] = {}

    def name(place: Path_, value: DTensor) -> dict[str, Any]:
        key = ".".join(map(str, place))
        tensors[key] = value
        return {_MARK: key, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}

    directory = path.with_name(f"{path.stem}-{token}{SUFFIX}")
    tree = _mapped(state, lambda value: isinstance(value, DTensor), name)
    return {**tree, SHARDS: directory.name}, Parts(tensors, directory, group)


def put_shards(
    state: Mapping[str, Any],
    path: Path,
    like: Like,
    group: distributed.ProcessGroup | None,
) -> dict[str, Any]:
    """Return the tree of a loaded checkpoint with its sharded tensors in place. A collective, unless ``group`` is None.

    Args:
        state: what was loaded from ``path``.
        path: of the checkpoint.
        like: returns an empty tensor to read into, for a place in the tree, a whole shape and a dtype.
        group: of the processes that read.

    Raises:
        CheckpointDamagedError: the directory is not what was written.
    """
    tensors: dict[str, torch.Tensor] = {}
    with naming_damage(path), warnings.catch_warnings():
        directory = shards_of(state, path)
        index = read_index(directory)

        def empty(place: Path_, mark: Mapping[str, Any]) -> torch.Tensor:
            name = mark[_MARK]
            if name in tensors or not same_form(index[name], mark["shape"], mark["dtype"]):
                raise ValueError(f"the file and the index do not agree on {name!r}")
            tensors[name] = made = like(place, torch.Size(mark["shape"]), dtype_of(index[name]))
            return made

        tree = _mapped(state, lambda value: isinstance(value, Mapping) and _MARK in value, empty)
        try:
            if group is None:
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is meant to be
            load(tensors, storage_reader=ShardReader(directory, index), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception
            raise ValueError(str(error)) from error
    return {key: value for key, value in tree.items() if key != SHARDS}


def spread(state: Mapping[str, Any], like: Like) -> dict[str, Any]:
    """Return the tree of a checkpoint that one process wrote alone, with each tensor sharded that ``like`` says is."""

    def shard(place: Path_, value: torch.Tensor) -> torch.Tensor:
        target = like(place, value.shape, value.dtype)
        if not isinstance(target, DTensor):
            return value
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # all have read it

    def may_be(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0

    return {key: value if key in _WHOLE else _mapped(value, may_be, shard, (key,)) for key, value in state.items()}


def _mapped(value: Any, chosen: Callable[[Any], bool], make: Callable[[Path_, Any], Any], place: Path_ = ()) -> Any:
    """Return ``value`` with what is chosen in its dicts, lists and tuples made into something else."""
    if chosen(value):
        return make(place, value)
    if isinstance(value, dict):
        made = {key: _mapped(entry, chosen, make, (*place, key)) for key, entry in value.items()}
        return made if type(value) is dict else value if all(made[key] is value[key] for key in value) else made
    if type(value) in (list, tuple):
        return type(value)(_mapped(entry, chosen, make, (*place, index)) for index, entry in enumerate(value))
    return value
