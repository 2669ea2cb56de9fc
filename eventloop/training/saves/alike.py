"""Check that a checkpoint has the state of all ranks; find out who writes tensors that several meshes hold.

A checkpoint holds each tensor once, by its name. Copies that no wrapper keeps equal, and pipeline stages that number their
layers from 0, have different tensors of one name: a file would silently lose those of all ranks but one, and a resume would
load these in their place. The same holds for tensors that are sharded over some of the processes. So this compares all ranks
once in a run, before its first save.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from trainbus.eventloop.checkpoint import is_dtensor, without_wrappers
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.privates import chunk_of
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.distributed.layout import find_layout
from trainbus.eventloop.training.optimizers import stepping
from trainbus.eventloop.training.saves.parameters import has_torch_layout

_MOST: Final = 4
"""Names in an error."""
_ADVICE: Final = (
    "Keep the model equal on all ranks (DistributedDataParallel, or average or broadcast it yourself) or shard it "
    "(fully_shard, parallelize_module). Pipeline stages and local experts are saved by their names: give each tensor its name "
    "in the whole model, as torch.distributed.pipelining does, or build the whole model and delete the modules of other ranks"
)
_ADVICE_OPTIMIZER: Final = (
    "An optimizer that keeps a part of its state on each rank must gather it on all ranks before a save, as by its own "
    "state_dict(); or leave it out: CheckpointHook(save_optimizer=False), from which a resume is not exact"
)


class _Held(NamedTuple):
    """A part of a tensor: the digest of its bytes, and the first rank that holds it."""

    digest: int
    first: int
    others: tuple[int, ...] = ()
    """The first rank that has other values."""


class _Shape(NamedTuple):
    """The form of a value, as text."""

    text: str
    of: str
    """The weight that it belongs to; empty for a weight, and ``_EVERY`` for what all ranks must have."""


_EVERY: Final = "every rank"

_Parts = dict[tuple[str, Any], _Held]
"""By the name of the tensor, and the place of the part in it; None for a plain tensor."""


def check_alike(
    ranks: Coordinator,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    loose: Mapping[str, Sequence[torch.Tensor]],
) -> None:
    """Compare the models and optimizers of all ranks; note in their layout which rank holds a sharded tensor first.

    ``loose`` has the parameters of each optimizer that are in no model.

    All ranks with a tensor of one name must have the same shape, and equal parameters. Buffers may differ, as in
    DistributedDataParallel, which keeps those of rank 0. A collective.

    Raises:
        ConfigurationError: a tensor of some ranks would not be in the checkpoint.
    """
    if ranks.layout.apart:  # since the run began the models may have got more
        data, problem = ranks.layout.data, ranks.layout.problem
        ranks.layout = find_layout(models, ranks.distinct)
        ranks.layout.data, ranks.layout.problem = data, problem  # they may be as the user has given them
    values = {(name, key): value for name, model in models.items() for key, value in model.state_dict().items()}
    labels = {key: _label(*key, models) for key in values}
    compared = {(name, key) for name, model in models.items() for key in _not_kept_equal(model, ranks.size)}
    shapes = {labels[key]: _Shape(_shape(value), "") for key, value in values.items()}
    for name, some in loose.items():
        for number, parameter in enumerate(some, start=1):
            key = name, f"parameter {number} of no model, in optimizer {name}"
            values[key], labels[key] = parameter, key[1]
            compared.add(key)
            shapes[key[1]] = _Shape(_shape(parameter), _EVERY)
    _check_shapes(ranks.distinct(shapes | _optimizer_shapes(models, optimizers)), apart=ranks.layout.apart)
    if ranks.layout.apart:
        _check_numbered(optimizers, loose)
    held: dict[str, Any] = {labels[key]: value for key, value in values.items() if key in compared}
    if ranks.layout.apart:
        held |= _options(optimizers)
    parts = {(label, place): _Held(_digest(part), ranks.rank) for label, place, part in _parts(held, ranks.size)}
    whole = ranks.merged(parts, _merged)
    if differing := [(label, part) for (label, _), part in whole.items() if part.others]:
        label, part = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise ConfigurationError(
            f"{label!r} has other values on rank {part.others[0]} than on rank {part.first}{more}, and a checkpoint would hold "
            f"those of rank {part.first} alone. {_ADVICE}"
        )
    if not ranks.layout.apart:  # else the names have told
        holders: dict[str, int] = {}
        for (label, place), part in whole.items():
            if place is not None:
                holders[label] = min(part.first, holders.get(label, part.first))
        ranks.layout.holders.update(holders)


def _options(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the options of groups that are tensors."""
    return {
        f"{name}: {option} of group {number}": value
        for name, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if isinstance(value, torch.Tensor)
    }


def _check_numbered(optimizers: Mapping[str, torch.optim.Optimizer], loose: Collection[str]) -> None:
    """Raise ConfigurationError if the states of ranks with different weights cannot be put together by names."""
    for name, optimizer in optimizers.items():
        if name in loose:
            problem = "has parameters that are in no model, so that no name tells them apart: give the run their model"
        elif not has_torch_layout(optimizer.state_dict()):
            problem = "has no state_dict() as torch's: leave its state out, CheckpointHook(save_optimizer=False)"
        else:
            continue
        raise ConfigurationError(f"ranks hold different weights, and the {type(optimizer).__name__} {name!r} {problem}")


def _label(name: str, key: str, models: Collection[str]) -> str:
    short = without_wrappers([key])[key]
    return short if len(models) == 1 else f"{name}.{short}"


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{', sharded' * is_dtensor(value)}"


def _optimizer_shapes(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, _Shape]:
    """Return the shapes in the states of optimizers; not of those that gather their state themselves."""
    names = {id(value): _label(name, key, models) for name, model in models.items() for key, value in model.named_parameters()}
    return {
        f"{name}: {key} of {names.get(id(parameter), 'a parameter')}": _Shape(_shape(value), names.get(id(parameter), _EVERY))
        for name, optimizer in optimizers.items()
        if type(stepping(optimizer)).state_dict is torch.optim.Optimizer.state_dict
        for parameter, state in stepping(optimizer).state.items()
        if isinstance(state, Mapping)  # some keep a count beside those of the parameters
        for key, value in state.items()
    }


def _check_shapes(everyones: Mapping[int, Mapping[str, _Shape]], *, apart: bool) -> None:
    """Raise ConfigurationError for a shape that differs, and for what only some of the ranks have that should.

    These are all ranks; or, if they hold different weights, those with the parameter that it belongs to.
    """
    first: dict[str, tuple[int, _Shape]] = {}
    for rank, own in everyones.items():
        for name, shape in own.items():
            lowest, there = first.setdefault(name, (rank, shape))
            if there != shape:
                raise ConfigurationError(
                    f"{name!r} is {there.text or 'no tensor'} on rank {lowest} and {shape.text or 'no tensor'} on rank {rank}, "
                    f"and a checkpoint would hold that of rank {lowest} alone. {_advice(name)}"
                )
    lacking: dict[tuple[int, int], list[str]] = {}
    for name, (rank, shape) in first.items():
        for other, own in everyones.items():
            if name not in own and (not apart or shape.of == _EVERY or shape.of in own):
                lacking.setdefault((other, rank), []).append(name)
    if lacking:
        (other, rank), names = min(lacking.items())
        names.sort(key=lambda name: (": " in name, name))  # first of models, then of optimizers
        shown = ", ".join([*map(repr, names[:_MOST]), *["…"] * (len(names) > _MOST)])
        raise ConfigurationError(
            f"of rank {min(other, rank)} and rank {max(other, rank)}, only rank {rank} has {shown}, and a checkpoint holds "
            f"what all ranks have. {_advice(names[0])}"
        )


def _advice(name: str) -> str:
    return _ADVICE_OPTIMIZER if ": " in name else _ADVICE


def _not_kept_equal(model: torch.nn.Module, size: int) -> set[str]:
    """Return the names of the parameters that DistributedDataParallel does not keep equal on all ranks."""
    kept = {
        f"{prefix}.module.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        if isinstance(module, DistributedDataParallel) and module.process_group.size() == size
        for name, _ in module.module.named_parameters(remove_duplicate=False)
        if name not in module.parameters_to_ignore
    }
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept


def _parts(values: Mapping[str, Any], size: int) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield the parts of this rank. A mesh of all ranks keeps its copies equal itself."""
    for label, value in values.items():
        part, place = value, None
        if is_dtensor(value):
            if value.device_mesh.size() == size or value.device_mesh.get_coordinate() is None:
                continue
            if any(placement.is_partial() for placement in value.placements):
                continue  # the save refuses it
            part, place = value.to_local(), chunk_of(value)
        # Others than dense tensors, and kinds of other libraries, may have no bytes to compare.
        if type(part.detach()) is torch.Tensor and part.layout is torch.strided and not part.is_meta and not is_lazy(part):
            yield label, place, part


def _digest(part: torch.Tensor) -> int:
    dense = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(dense.reshape(-1).view(torch.uint8).numpy().data)


def _merged(lower: _Parts, higher: _Parts) -> _Parts:
    return {**higher, **{key: _joined(one, higher.get(key)) for key, one in lower.items()}}


def _joined(lower: _Held, higher: _Held | None) -> _Held:
    if higher is None or lower.others or lower.digest == higher.digest:
        return lower._replace(others=lower.others or (higher.others if higher is not None else ()))
    return lower._replace(others=(higher.first,))
