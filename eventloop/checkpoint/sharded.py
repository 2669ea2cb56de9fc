"""Checkpoints of state that is spread over processes (FSDP2's ``fully_shard``): each one writes its own part.

The tree is one file, as in other checkpoints, with a name in place of each sharded tensor (``DTensor``). The tensors are in
a directory beside it, one file from each process and an index (see ``shards``). Every process stages and writes its part as
any other checkpoint, on disk or in a store; when all have done so, rank 0 writes the index, and then the file that names the
directory. So a checkpoint exists when every part of it is durable, and a directory that no file names can be removed
(``shards.sweep_shards``).

Tensors are read back with the placement of the reading run: any number of processes, or one that shards nothing. Each process
reads the bytes that it needs, and no more. In memory, the dimensions of its part have the order that they had on rank 0.

It replaces ``torch.distributed.checkpoint``, which wrote the parts of 0.2. That copies on the training thread, into new
memory each time, pickles each tensor, and needs a store in which files can be renamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from trainbus.eventloop.checkpoint import shards
from trainbus.eventloop.checkpoint.forms import strides_like, with_kind
from trainbus.eventloop.checkpoint.overlap import Overlap
from trainbus.eventloop.checkpoint.pieces import Box, Keys, ReadTarget, fill, mapped, shared_box
from trainbus.eventloop.checkpoint.rebuild import DTYPES
from trainbus.eventloop.checkpoint.shards import COMMITTED, INDEX, MARK, Indexed, Piece
from trainbus.eventloop.checkpoint.stage import StageBuffer, StagedTree, save, stage, write
from trainbus.eventloop.checkpoint.store import AnyPath, commit_bytes, link, make_directory, open_file
from trainbus.eventloop.checkpoint.together import Together
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, CheckpointValueError
from trainbus.eventloop.privates import chunk_of

_WHOLE: Final = frozenset({"progress", "data", "rng", "ranks", "stateful", "info"})  # in a run's tree: no weights in them

_LAYOUTS: Final = (
    "A checkpoint holds each tensor whole, from meshes with rank 0 among them: pipeline stages and experts that only some "
    "processes know need torch.distributed.checkpoint"
)

Like = Callable[[Keys, torch.Size, torch.dtype], torch.Tensor]
"""Makes an empty tensor for a value in the tree, a whole shape and a dtype, with the placement that it has in this run."""


class ShardStage:
    """Copies the sharded tensors of this process; keeps memory, and where each part begins, from one save to the next."""

    def __init__(self) -> None:
        self._buffer = StageBuffer()
        self._boxes: dict[Any, Box] = {}
        self._checked: dict[str, Indexed] = {}
        self.written_elsewhere: Collection[DeviceMesh] = ()
        """Meshes that have copies of parts which processes of another mesh write."""

    def copy_parts(
        self,
        state: dict[str, Any],
        path: AnyPath,
        token: str,
        group: distributed.ProcessGroup | None,
        *,
        overlap: Overlap | None = None,
    ) -> tuple[dict[str, Any], Parts]:
        """Return the tree ``state`` with a name in place of each sharded tensor, and those tensors, copied.

        Args:
            state: the tree.
            path: the file that the tree will be written to.
            token: 8 hexadecimal digits that no earlier checkpoint had, the same on all processes.
            group: all the processes, used for nothing else at the same time; None where there is one without any group.
            overlap: copies the tensors of its optimizers later, while the caller continues.

        Raises:
            CheckpointValueError: a tensor whose parts are still to be added up.
        """
        tensors: dict[str, DTensor] = {}
        parts: dict[str, torch.Tensor] = {}

        def name(keys: Keys, value: DTensor) -> dict[str, Any]:
            key = ".".join(map(str, keys))
            tensors[key] = value
            with torch.no_grad():
                parts[key] = value.to_local()
            return shards.mark(key, value, parts[key])

        tree = mapped(state, lambda value: isinstance(value, DTensor), name)
        own = {
            key: box
            for number, (key, value) in enumerate(tensors.items())
            if self._is_writer(value, number) and 0 not in (box := self._box(key, value)).shape
        }
        with torch.no_grad():
            staged = stage({key: parts[key] for key in own}, self._buffer, overlap=overlap)
        name_of_all = f"{path.stem}-{token}{shards.SHARDS_SUFFIX}"
        return {**tree, shards.SHARDS: name_of_all}, Parts(tensors, own, staged, name_of_all, group, self._checked)

    def _box(self, key: str, value: DTensor) -> Box:
        # torch takes 0.1 ms to find it, and the same tensors come at each save.
        known = (key, value.shape, value.device_mesh, value.placements)
        found = self._boxes.get(known)
        if found is None:
            try:
                found = self._boxes[known] = Box(*chunk_of(value))
            except ValueError as error:
                raise CheckpointValueError(f"{key}: cannot store a tensor whose parts are still to be added up") from error
        return found

    def _is_writer(self, value: DTensor, number: int) -> bool:
        """Return True on the process that writes its part of a tensor; of processes that hold the same part, one does."""
        at, mesh = value.device_mesh.get_coordinate(), value.device_mesh
        if at is None or mesh in self.written_elsewhere:  # this process has none of it, or a copy
            return False
        copies = (dim for dim, placement in enumerate(value.placements) if placement.is_replicate())
        return all(at[dim] == number % mesh.size(dim) for dim in copies)


class Parts:
    """This process's part of one checkpoint, on its way into new directories."""

    def __init__(
        self,
        tensors: Mapping[str, DTensor],
        own: dict[str, Box],
        staged: StagedTree,
        name: str,
        group: distributed.ProcessGroup | None,
        checked: dict[str, Indexed],
    ) -> None:
        self._checked = checked  # the last index that was read as a reader would; layouts rarely change
        self._meshes = {key: one.device_mesh for key, one in tensors.items()}
        self._tensors = {key: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for key, one in tensors.items()}
        self._sizes = {key: one.element_size() for key, one in tensors.items()}
        self._own = own
        self._staged = staged
        self.name = name
        """The name of the directories."""
        self._places: list[AnyPath] = []
        """The directories that have all parts."""
        self._index: dict[str, Indexed] = {}
        self._files: set[str] = set()
        """The files of all parts, on rank 0."""
        self._all = Together(group)

    def release(self) -> None:
        """Give the memory back; in further directories the part is then linked or copied from one that has it."""
        self._staged.release()

    def commit(self, beside: AnyPath, write: Callable[[], int], *, apart: bool = False) -> int:
        """Write this process's part into the directory of ``beside``, unless that has it; wait for the others' parts.

        Then rank 0 writes the file, by ``write``. Return its result; 0 on others.

        With ``apart`` the directory may be another one for each process, so that no reader sees all parts. Each then notes in
        its own that the file exists.

        A collective. All processes raise CheckpointError if one of them fails.
        """
        directory, first = beside.with_name(self.name), self._all.first
        what = f"cannot write {directory}"
        if directory not in self._places:
            self._all.do(what, lambda: make_directory(directory) if first or (apart and self._own) else None)
            if self._places:
                self._all.do(what, lambda: self._link_part(directory))
            else:
                pieces = self._all.gather(self._all.do(what, lambda: self._write_part(directory)))
                self._files = {piece.file for one in pieces for _, piece in one}
                self._all.do(what, lambda: self._put_together(pieces))
        size = self._all.do(what, lambda: self._finish(directory, write) if first else 0)
        if apart and self._own:
            commit_bytes(directory / COMMITTED, b"")
        if directory not in self._places:
            self._places.append(directory)
        return int(size)

    def _link_part(self, directory: AnyPath) -> None:
        if self._own:
            link(self._places[0] / (name := shards.part_name(self._all.rank)), directory / name)

    def _write_part(self, directory: AnyPath) -> list[tuple[str, Piece]]:
        if self._staged.released:
            raise CheckpointError("the save that had its tensors could not be written")
        name, begins = shards.part_name(self._all.rank), self._staged.offsets()
        pieces = [
            (key, Piece(*box, name, begin, torch.Size(box.shape).numel() * self._sizes[key]))
            for (key, box), begin in zip(self._own.items(), begins, strict=True)
        ]
        if isinstance(directory, Path) and not directory.is_dir():
            raise CheckpointError("it does not see the directory that rank 0 has made; give one that all share, or a URL")
        if pieces:
            write(self._staged, directory / name, release=False)  # another directory may need it, if this one fails
        return pieces

    def _put_together(self, pieces: list[list[tuple[str, Piece]]]) -> None:
        """Make the index on rank 0, and check what a reader would: that the pieces make up each tensor exactly."""
        index = {key: Indexed(dtype, shape, []) for key, (dtype, shape) in self._tensors.items()} if self._all.first else {}
        for rank, of_rank in enumerate(pieces):
            for key, piece in of_rank:
                if key not in index:
                    raise CheckpointError(f"rank {rank} has a part of {key}, which rank 0 does not know. {_LAYOUTS}")
                index[key].pieces.append(piece)
        if index != self._checked:
            sizes: dict[str, int] = {}
            for piece in shards.all_pieces(index):
                sizes[piece.file] = max(sizes.get(piece.file, 0), piece.begin + piece.bytes)
            for key, tensor in index.items():
                if not shards.is_sound(tensor, sizes):
                    raise CheckpointError(
                        f"the parts of {key} do not make up the whole of {tensor.shape}: rank 0 has it on {self._meshes[key]}. "
                        f"{_LAYOUTS}"
                    )
            self._checked.clear()
            self._checked.update(index)
        self._index = index

    def _finish(self, directory: AnyPath, write: Callable[[], int]) -> int:
        if directory not in self._places:
            shards.check_parts(directory, self._files)
            save(shards.packed_index(self._index), directory / INDEX)
            make_directory(directory)  # syncs its name
        return write()


def put_shards(state: Mapping[str, Any], path: AnyPath, like: Like) -> dict[str, Any]:
    """Return the tree of a loaded checkpoint with its sharded tensors; of each, this process reads its own part.

    ``state`` is the tree loaded from ``path``; ``like`` makes the tensors to read into. Raises CheckpointDamagedError.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[Any, torch.Tensor] = {}
    with shards.naming_damage(path):
        directory = shards.shards_of(state, path)
        index = shards.read_index(directory)

        def empty(keys: Keys, mark: Mapping[str, Any]) -> torch.Tensor:
            name, shape, dtype = mark[MARK], mark["shape"], mark["dtype"]
            if name in tensors or (list(index[name].shape), index[name].dtype) != (shape, dtype):
                raise ValueError(f"the file and the index do not agree on {name!r}")
            made = _in_order(like(keys, torch.Size(shape), DTYPES[dtype]), mark.get("strides"))
            kind = mark.get("kind", 0)
            placement = (made.device_mesh, made.placements) if isinstance(made, DTensor) else made.device
            tensors[name] = tied.setdefault((placement, dtype, kind, *shape, *index[name].pieces), with_kind(made, kind))
            return tensors[name]

        tree = mapped(state, lambda value: isinstance(value, Mapping) and MARK in value, empty)
        with torch.no_grad():
            _read(directory, index, tensors)
    return {key: value for key, value in tree.items() if key != shards.SHARDS}


def _in_order(made: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return an empty tensor as it is, or one like it, its dimensions in the order in memory of others with these strides."""
    part = made.to_local() if isinstance(made, DTensor) else made
    if strides is None or part.stride() == (wanted := strides_like(part.shape, strides)):
        return made
    part = torch.empty_strided(part.shape, wanted, dtype=part.dtype, device=part.device)
    if not isinstance(made, DTensor):
        return part
    whole = strides_like(made.shape, strides)
    return DTensor.from_local(part, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=whole)


def _read(directory: AnyPath, index: Mapping[str, Indexed], tensors: Mapping[str, torch.Tensor]) -> None:
    wanted: dict[str, list[tuple[Piece, ReadTarget]]] = defaultdict(list)  # by file, so that each is opened once
    missing: dict[str, int] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values():  # of tied ones, one
        sharded = isinstance(tensor, DTensor)
        box = Box(*chunk_of(tensor)) if sharded else Box((0,) * tensor.dim(), tuple(tensor.shape))
        target = ReadTarget(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor, box)
        missing[name] = target.tensor.numel()
        for piece in index[name].pieces:
            if shared_box(Box(piece.offsets, piece.shape), box) is not None:
                wanted[piece.file].append((piece, target))
    for file, pieces in wanted.items():
        with open_file(directory / file) as (opened, _):
            for piece, target in sorted(pieces, key=lambda one: one[0].begin):
                missing[target.name] -= fill(target, opened, piece)
    if lacking := [name for name, count in missing.items() if count]:
        raise CheckpointDamagedError(f"the parts do not make up {lacking[0]!r}")


def spread(state: Mapping[str, Any], like: Like) -> dict[str, Any]:
    """Return the tree of a checkpoint that one process wrote alone, with each tensor sharded as ``like`` makes it."""

    def shard(keys: Keys, value: torch.Tensor) -> torch.Tensor:
        target = like(keys, value.shape, value.dtype)
        if not isinstance(target, DTensor):
            return value
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # all have read it

    def may_be(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0

    return {key: value if key in _WHOLE else mapped(value, may_be, shard, (key,)) for key, value in state.items()}
