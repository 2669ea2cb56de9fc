"""``RankLayout``: which ranks hold which weights of the models, and which of them need the same batches.

Most often each rank has all names: it holds whole weights, or a part of each. Pipeline stages and local experts are *apart*:
ranks hold tensors that others lack, each under the name that it has in the whole model. Such names tell what is the same.

Ranks that hold one copy of a model together (by tensor, context or pipeline parallelism) train on the same batches: to the
data they are one. Who they are is found from the meshes of ``fully_shard``, from ``DistributedDataParallel``, or given as
``data_mesh=``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from trainbus.eventloop.checkpoint import WrapperNames, is_dtensor, is_sharded
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.privates import fsdp_mesh, root_size
from trainbus.eventloop.world import this_rank, world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataRank(NamedTuple):
    """Where this process is among those that train on different batches. Ranks of one copy of the model have the same."""

    rank: int = 0
    size: int = 1

    @property
    def shares(self) -> bool:
        """True if several ranks train on the same batches."""
        return self.size < world_size()


UNKNOWN = (
    'the processes of model {label!r} that need the same batches cannot be told from {what}: give data_mesh=mesh["dp"], '
    'where "dp" is the dimension of a DeviceMesh along which batches differ'
)


def _each_rank() -> DataRank:
    return DataRank(this_rank(), world_size())


def data_rank(models: Mapping[str, torch.nn.Module], mesh: DeviceMesh | None = None) -> DataRank:
    """Return the place of this process among those that train on different batches.

    Args:
        models: the models.
        mesh: the mesh of these processes, of one or more dimensions, if the user has given it.

    Raises:
        ConfigurationError: it cannot be told: a model is spread over some of the processes, by no ``fully_shard`` or
            ``DistributedDataParallel``, or over a mesh that has a dimension of context parallelism.
    """
    if mesh is not None:
        return _place_in(mesh)
    world = world_size()
    if world == 1:
        return DataRank()
    places = [_each_rank()]
    for label, model in models.items():
        found = [*_places(model, label)]
        if found:
            places.append(max(found, key=lambda one: one.size))
        elif spread := [(name, one) for name, one in model.named_parameters() if _is_spread(one)]:
            name, tensor = max(spread, key=lambda one: one[1].device_mesh.size())  # type: ignore[attr-defined]  # a DTensor
            if tensor.device_mesh.size() < world:  # type: ignore[attr-defined]
                raise ConfigurationError(UNKNOWN.format(label=label, what=name))
            places.append(DataRank())
    return min(places, key=lambda one: one.size)


def _is_spread(parameter: Any) -> bool:
    """Return False also for whole copies, which data parallelism keeps as ``DTensor``, too (``distribute_module``)."""
    return is_dtensor(parameter) and not all(one.is_replicate() for one in parameter.placements)


def _places(model: torch.nn.Module, label: str) -> Iterator[DataRank]:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            group = module.process_group
            yield DataRank(group.rank(), group.size())
        elif (mesh := fsdp_mesh(module)) is not None and mesh.get_coordinate() is not None:
            if any("cp" in str(one).split("_") for one in mesh.mesh_dim_names or ()) and root_size(mesh, "cp") != 1:
                raise ConfigurationError(UNKNOWN.format(label=label, what=f"the mesh of {name or 'it'}, {mesh.mesh_dim_names}"))
            yield _place_in(mesh)


def _place_in(mesh: DeviceMesh) -> DataRank:
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigurationError(f"data_mesh={mesh}: this process (rank {this_rank()}) is not in it")
    shape = tuple(mesh.mesh.shape)
    return DataRank(sum(at * prod(shape[number + 1 :]) for number, at in enumerate(place)), prod(shape))


class RankLayout:
    """What the ranks of a run hold; by default, all hold the same whole weights.

    Args:
        data: the place of this rank among those that train on different batches.
        problem: why that cannot be told, if so.
        sharded: whether weights of any rank are spread over processes.
        own: the names of this rank's weights, if ranks have different ones.
        holders: the first rank that holds each name of any rank, likewise.
    """

    def __init__(
        self,
        data: DataRank | None = None,
        problem: str = "",
        *,
        sharded: bool = False,
        own: Collection[str] = (),
        holders: Mapping[str, int] | None = None,
    ) -> None:
        self.data = data or _each_rank()
        self.problem = problem
        self.apart = holders is not None
        """True if ranks hold weights that others lack."""
        self.in_parts = sharded or self.apart
        """True if a checkpoint has parts of several ranks."""
        self.own = frozenset(own)
        self.holders: dict[str, int] = dict(holders or {})
        """The first rank that holds each weight, as far as that may be another one than rank 0."""

    def is_elsewhere(self, name: str) -> bool:
        """Return True for weights that this rank lacks and another one holds."""
        return self.apart and name in self.holders and name not in self.own


def find_layout(
    models: Mapping[str, torch.nn.Module], distinct: Callable[[Any], Mapping[int, Any]], mesh: DeviceMesh | None = None
) -> RankLayout:
    """Compare the names of the models' weights on all ranks, by ``Coordinator.distinct``. A collective.

    The usual case takes one exchange of a few bytes, and no look at a ``state_dict``. ``mesh`` is that of :func:`data_rank`.
    """
    data, problem = _each_rank(), ""
    try:
        data = data_rank(models, mesh)
    except ConfigurationError as error:
        if mesh is not None:
            raise
        problem = str(error)
    copy = _copy_of_model(models) if problem else ()
    told = mesh is not None or _is_wrapped(models)
    found = distinct((_digest(models), any(map(is_sharded, models.values())), copy, problem, told, data.size))
    digests, spread, copies, problems, alls_told, sizes = (sorted({*one}) for one in zip(*found.values(), strict=True))
    sharded, apart = any(spread), len(digests) > 1
    if not apart and all(copies) and sum(map(len, copies)) == world_size():
        data, problem = DataRank(copies.index(copy), len(copies)), ""
    elif any(problems) or len(sizes) > 1 or (apart and not all(alls_told)):
        what = "its weights, of which ranks have different ones"
        data = _each_rank()  # on all ranks alike
        problem = next(filter(None, problems), "") or UNKNOWN.format(label=next(iter(models)), what=what)
    if not apart:
        return RankLayout(data, problem, sharded=sharded)
    weights = dict(named_weights(models))
    own = [name for name, value in weights.items() if not (is_dtensor(value) and value.device_mesh.get_coordinate() is None)]
    holders: dict[str, int] = {}
    for rank, names in distinct(own).items():
        for name in names:
            holders.setdefault(name, rank)
    return RankLayout(data, problem, sharded=sharded, own=weights, holders=holders)


def _is_wrapped(models: Mapping[str, torch.nn.Module]) -> bool:
    modules = [module for model in models.values() for module in model.modules()]
    return any(isinstance(module, DistributedDataParallel) or fsdp_mesh(module) is not None for module in modules)


def _copy_of_model(models: Mapping[str, torch.nn.Module]) -> tuple[int, ...]:
    """Return the ranks that hold a copy of the models with this one, by tensor parallelism; () if that cannot be told."""
    if any(fsdp_mesh(module) is not None for model in models.values() for module in model.modules()):
        return ()
    meshes: list[Any] = [one.device_mesh for model in models.values() for one in model.parameters() if is_dtensor(one)]  # type: ignore[attr-defined]
    found = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    return found.pop() if len(found) == 1 else ()


def named_weights(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield each value in the ``state_dict`` of the models, by its key in checkpoints; of several, behind the model's name."""
    for model_name, model in models.items():
        prefix, state = "" if set(models) == {"model"} else f"{model_name}.", model.state_dict()
        for name, key in WrapperNames(model, state).short.items():
            yield f"{prefix}{key}", state[name]


def _digest(models: Mapping[str, torch.nn.Module]) -> bytes:
    found = hashlib.sha256()
    for model_name, model in models.items():
        names = sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
        found.update("\n".join([model_name, *names, ""]).encode("utf-8", "surrogatepass"))
    return found.digest()
