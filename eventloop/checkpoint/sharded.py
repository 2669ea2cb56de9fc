"""Checkpoints of state that is spread over processes (FSDP2's ``fully_shard``): each one writes its own part.

The tree is one file, as in other checkpoints, with a name in place of each sharded tensor (``DTensor``), and of each tensor
that rank 0 lacks. These are in a directory beside it, one file from each process and an index (see ``shards``). Every process
stages and writes its part as any other checkpoint, on disk or in a store; when all have done so, rank 0 writes the index, and
then the file that names the directory. So a checkpoint exists when every part of it is durable, and a directory that no file
names can be removed (``shards.sweep_shards``).

A tensor may be on several meshes, each of which has all of it: copies of FSDP2 on one dimension of a mesh. That of the lowest
rank writes it. ``Places`` tells which rank that is, so that no other one copies its part; the index decides in any case.

Tensors are read back with the placement of the reading run: any number of processes, or one that shards nothing. Each process
reads the bytes that it needs, and no more. In memory, the dimensions of its part have the order that they had on rank 0.

It replaces ``torch.distributed.checkpoint``, which wrote the parts of 0.2. That copies on the training thread, into new
memory each time, pickles each tensor, and needs a store in which files can be renamed.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor

from trainbus.eventloop.checkpoint import shards
from trainbus.eventloop.checkpoint.forms import strides_like, with_kind
from trainbus.eventloop.checkpoint.marks import mark
from trainbus.eventloop.checkpoint.overlap import Overlap
from trainbus.eventloop.checkpoint.pieces import Box, Keys, ReadTarget, fill, mapped, shared_box
from trainbus.eventloop.checkpoint.places import Places
from trainbus.eventloop.checkpoint.rebuild import DTYPES
from trainbus.eventloop.checkpoint.shards import COMMITTED, INDEX, MARK, Indexed, Piece
from trainbus.eventloop.checkpoint.staging import StageBuffer, StagedTree, save, stage, write
from trainbus.eventloop.checkpoint.store import AnyPath, commit_bytes, link, make_directory, open_file
from trainbus.eventloop.checkpoint.together import Together
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, CheckpointValueError
from trainbus.eventloop.privates import chunk_of
from trainbus.eventloop.world import world_size

_WHOLE: Final = frozenset({"progress", "data", "rng", "ranks", "stateful", "info"})  # in a run's tree: no weights in them

Like = Callable[[Keys, torch.Size, torch.dtype], torch.Tensor]
"""Makes an empty tensor for a value in the tree, a whole shape and a dtype, with the placement that it has in this run."""


class _Part(NamedTuple):
    """What this process writes of a tensor."""

    box: Box
    origin: int
    """The first process that holds the tensor: of several meshes that have it, the index takes the pieces of one."""
    compared: bool
    """Whether all that hold it are known to have the same."""


class _Written(NamedTuple):
    """A piece in the file of a process."""

    key: str
    origin: int
    piece: Piece


class _Share(NamedTuple):
    """What process 0 gets to know of the part of another one."""

    pieces: list[_Written] | None
    """None if they are those of the last save."""
    crcs: dict[int, int]
    """By the place in ``pieces``, of what was not compared."""
    graft: dict[str, Any] | None
    """See ``Places``."""


class _Layout:
    """Which process writes what, as the last save had it. It rarely changes, and thousands of processes have many pieces."""

    told: list[_Written] | None = None
    """The pieces of this process, if process 0 knows them."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[_Written]] = {}
        """By process, on process 0."""
        self.index: dict[str, Indexed] = {}
        self.packed: dict[str, bytes] = {}
        """The index as the bytes of its file, once a reader would take it."""

    def take(self, shares: Sequence[_Share], marks: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the index, if the pieces or the tensors have changed.

        Raises:
            CheckpointError: a process has a part of a tensor that is in no tree.
        """
        new = {rank: one.pieces for rank, one in enumerate(shares) if one.pieces is not None}
        self.pieces.update(new)
        tensors = {key: (mark["dtype"], tuple(mark["shape"])) for key, mark in marks.items()}
        if not new and tensors == {key: (one.dtype, one.shape) for key, one in self.index.items()}:
            return
        self.packed = {}
        self.index = {key: Indexed(*one, []) for key, one in tensors.items()}
        origins: dict[str, int] = {}
        for one in self.written():
            origins[one.key] = min(one.origin, origins.get(one.key, one.origin))
        for one in self.written():
            if one.key not in self.index:
                raise CheckpointError(f"{one.piece.file} has a part of {one.key}, and the tree of rank {one.origin} does not")
            if one.origin == origins[one.key]:
                self.index[one.key].pieces.append(one.piece)

    def written(self) -> Iterator[_Written]:
        """Return what all processes write, in their order."""
        return chain.from_iterable(self.pieces[rank] for rank in sorted(self.pieces))


class ShardStage:
    """Copies the sharded tensors of this process; keeps memory, and where each part begins, from one save to the next."""

    def __init__(self) -> None:
        self._buffer = StageBuffer()
        self._parts: dict[Any, _Part | None] = {}
        self._layout = _Layout()

    def copy_parts(
        self,
        state: dict[str, Any],
        path: AnyPath,
        token: str,
        group: distributed.ProcessGroup | None,
        places: Places | None = None,
        *,
        overlap: Overlap | None = None,
    ) -> tuple[dict[str, Any], Parts]:
        """Return the tree ``state`` with a name in place of each sharded tensor, and those tensors, copied.

        Args:
            state: the tree.
            path: the file that the tree will be written to.
            token: 8 hexadecimal digits that no earlier checkpoint had, the same on all processes.
            group: all the processes, used for nothing else at the same time; None where there is one without any group.
            places: where the tensors of the tree are; None if all processes have the same paths.
            overlap: copies the tensors of its optimizers later, while the caller continues.

        Raises:
            CheckpointValueError: a tensor whose parts are still to be added up.
        """
        places, rank = places or Places(), 0 if group is None else distributed.get_rank(group)
        meshes: dict[str, object] = {}
        marks: dict[str, dict[str, Any]] = {}
        tensors: dict[str, torch.Tensor] = {}
        own: dict[str, _Part] = {}

        def name(keys: Keys, value: torch.Tensor) -> object:
            spread, owner = isinstance(value, DTensor), places.owner(keys)
            if not spread and not owner:
                return value  # rank 0 has it
            key = ".".join(map(str, places.named(keys)))
            if value.layout is not torch.strided:
                raise CheckpointValueError(f"{key}: of ranks with different weights, only rank 0 can save a sparse tensor")
            while key in marks:  # the same dots in another way
                key += "'"
            if isinstance(value, DTensor):
                part, meshes[key] = self._part(key, value, owner), value.device_mesh
                with torch.no_grad():
                    tensor = value.to_local()
                if part is not None and part.box.shape != tuple(tensor.shape):
                    raise CheckpointValueError(
                        f"{key}: by its placement the part of rank {rank} has the shape {part.box.shape}, and it has "
                        f"{tuple(tensor.shape)}: give DTensor.from_local() the shape and stride of the whole"
                    )
            else:
                whole = _Part(Box((0,) * value.dim(), tuple(value.shape)), rank, compared=True)
                part, tensor = whole if owner == rank else None, value
            marks[key] = mark(key, value, tensor)
            if part is not None and 0 not in part.box.shape:
                own[key], tensors[key] = part, tensor
            return marks[key]

        tree = mapped(state, lambda value: isinstance(value, torch.Tensor), name)
        with torch.no_grad():
            staged = stage(tensors, self._buffer, overlap=overlap)
        name_of_all = f"{path.stem}-{token}{shards.SHARDS_SUFFIX}"
        # What another tree may lack is known to the first process of each mesh, or to that alone.
        graft = places.graft(tree) if rank in {part.origin for part in own.values()} - {0} else None
        parts = Parts(marks, meshes, own, graft, staged, name_of_all, group, places, self._layout)
        return {**tree, shards.SHARDS: name_of_all}, parts

    def _part(self, key: str, value: DTensor, owner: int | None) -> _Part | None:
        """Return what this process writes of a sharded tensor; None if another one does."""
        # torch takes 0.1 ms to find it, and the same tensors come at each save.
        known = (key, value.shape, value.device_mesh, value.placements, owner)
        if known not in self._parts:
            try:
                box = Box(*chunk_of(value))
            except ValueError as error:
                raise CheckpointValueError(f"{key}: cannot store a tensor whose parts are still to be added up") from error
            first, all_here = int(value.device_mesh.mesh.min()), value.device_mesh.size() == world_size()
            found = _Part(box, first if owner is None else owner, compared=owner is not None or all_here)
            self._parts[known] = found if _is_writer(key, value, owner) else None
        return self._parts[known]


def _is_writer(key: str, value: DTensor, owner: int | None) -> bool:
    """Return True on the process that writes its part of a tensor; of processes that hold the same part, one does."""
    at, mesh = value.device_mesh.get_coordinate(), value.device_mesh
    if at is None or not (owner is None or bool((mesh.mesh == owner).any())):  # this process has none of it, or a copy
        return False
    copies = (dim for dim, placement in enumerate(value.placements) if placement.is_replicate())
    # By its name, as another process of the mesh may have more tensors before it.
    return all(at[dim] == zlib.crc32(key.encode()) % mesh.size(dim) for dim in copies)


class Parts:
    """This process's part of one checkpoint, on its way into new directories."""

    file: StagedTree | None = None
    """The tree, on rank 0, which gets what only others know of it."""

    def __init__(
        self,
        marks: Mapping[str, dict[str, Any]],
        meshes: Mapping[str, object],
        own: dict[str, _Part],
        graft: dict[str, Any] | None,
        staged: StagedTree,
        name: str,
        group: distributed.ProcessGroup | None,
        places: Places,
        layout: _Layout,
    ) -> None:
        self._layout = layout
        self._marks = marks
        self._meshes = meshes
        self._own = own
        self._graft = graft
        self._staged = staged
        self.name = name
        """The name of the directories."""
        self._directories: list[AnyPath] = []
        """Those that have all parts."""
        self._all = Together(group)
        self._places = places

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
        if directory not in self._directories:
            self._all.do(what, lambda: make_directory(directory) if first or (apart and self._own) else None)
            if self._directories:
                self._all.do(what, lambda: self._link_part(directory))
            else:
                pieces, share = self._all.do(what, lambda: self._write_part(directory))
                self._layout.told, shares = None, self._all.gather(share)
                self._all.do(what, lambda: self._put_together(shares) if first else None)
                self._layout.told = pieces
        size = self._all.do(what, lambda: self._finish(directory, write, apart=apart) if first else 0)
        if apart and self._own:
            commit_bytes(directory / COMMITTED, b"")
        if directory not in self._directories:
            self._directories.append(directory)
        return int(size)

    def _link_part(self, directory: AnyPath) -> None:
        if self._own:
            link(self._directories[0] / (name := shards.part_name(self._all.rank)), directory / name)

    def _write_part(self, directory: AnyPath) -> tuple[list[_Written], _Share]:
        if self._staged.released:
            raise CheckpointError("the save that had its tensors could not be written")
        name, begins = shards.part_name(self._all.rank), self._staged.offsets()
        pieces: list[_Written] = []
        crcs: dict[int, int] = {}
        for (key, part), begin in zip(self._own.items(), begins, strict=True):
            size = torch.Size(part.box.shape).numel() * DTYPES[self._marks[key]["dtype"]].itemsize
            if not part.compared:
                crcs[len(pieces)] = self._staged.crc32(begin, size)
            pieces.append(_Written(key, part.origin, Piece(*part.box, name, begin, size)))
        if isinstance(directory, Path) and not directory.is_dir():
            raise CheckpointError("it does not see the directory that rank 0 has made; give one that all share, or a URL")
        if pieces:
            write(self._staged, directory / name, release=False)  # another directory may need it, if this one fails
        return pieces, _Share(None if pieces == self._layout.told else pieces, crcs, self._graft)

    def _put_together(self, shares: list[_Share]) -> None:
        """Make the tree and the index on rank 0, and check that the pieces make up each tensor exactly."""
        grafts, marks = [one.graft for one in shares if one.graft is not None], dict(self._marks)
        if grafts and self.file is not None:
            joined = self.file.rewrite(set().union(*grafts), lambda tree: self._places.joined(tree, grafts))
            marks = {found[MARK]: found for found in shards.marks_in(joined)} | marks
        layout = self._layout
        layout.take(shares, marks)
        first: dict[tuple[str, Any], tuple[int, int]] = {}
        for rank, share in enumerate(shares):
            for number, crc in share.crcs.items():
                one = layout.pieces[rank][number]
                there, same = first.setdefault((one.key, (one.piece.offsets, one.piece.shape)), (one.origin, crc))
                if same != crc:
                    raise CheckpointError(
                        f"{one.key} has other values on rank {one.origin} than on rank {there}, and a checkpoint holds one "
                        "of them: give the tensors names of their own, or keep them equal"
                    )
        if not layout.packed:
            sizes: dict[str, int] = {}
            for piece in shards.all_pieces(layout.index):
                sizes[piece.file] = max(sizes.get(piece.file, 0), piece.begin + piece.bytes)
            for key, tensor in layout.index.items():
                if not shards.is_sound(tensor, sizes):
                    where = f": rank 0 has it on {self._meshes[key]}" if key in self._meshes else ""
                    raise CheckpointError(f"the parts of {key} do not make up the whole of {tensor.shape}{where}")

    def _finish(self, directory: AnyPath, write: Callable[[], int], *, apart: bool) -> int:
        if directory not in self._directories:
            layout = self._layout
            packed = layout.packed or shards.packed_index(layout.index)
            shards.check_parts(directory, {one.piece.file for some in layout.pieces.values() for one in some[:1]})
            save(packed, directory / INDEX)
            if not (apart or layout.packed):  # apart, no process sees all files
                shards.read_index(directory)  # as a reader will
            layout.packed = packed
            make_directory(directory)  # syncs its name
        return write()


def put_shards(state: Mapping[str, Any], path: AnyPath, like: Like) -> dict[str, Any]:
    """Return the tree of a loaded checkpoint with its sharded tensors; of each, this process reads its own part.

    ``state`` is the tree loaded from ``path``; ``like`` makes the tensors to read into. Raises CheckpointDamagedError.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[Any, torch.Tensor] = {}
    with shards.naming_damage(path):
        directory, index = shards.read_shards(state, path)

        def empty(keys: Keys, mark: Mapping[str, Any]) -> torch.Tensor:
            name, shape, dtype = mark[MARK], mark["shape"], mark["dtype"]
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
    """Return the tree of a checkpoint with each whole tensor sharded as ``like`` makes it."""

    def shard(keys: Keys, value: torch.Tensor) -> torch.Tensor:
        target = like(keys, value.shape, value.dtype)
        if not isinstance(target, DTensor):
            return value
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # all have read it

    def may_be(value: Any) -> bool:
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        return plain and value.is_floating_point() and value.dim() > 0

    return {key: value if key in _WHOLE else mapped(value, may_be, shard, (key,)) for key, value in state.items()}
