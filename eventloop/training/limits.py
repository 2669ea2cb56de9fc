"""Limits on the batches of an epoch: ``limit_train_batches``, ``limit_val_batches`` and ``overfit_batches`` of a loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.sampler import BatchSampler

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.training.loaders import is_plain, length_of, rebuilt

Data = dict[str, Iterable[Any] | None]


def limited(
    data: Data, limits: Mapping[str, int | float | None], overfit: float | None, *, divides: bool
) -> tuple[Data, dict[str, int | float]]:
    """Return the data of ``"train"`` and ``"val"``, unshuffled for ``overfit``, and the limits by ``"train_data"`` and so on.

    The data of a stage without batches is None.

    Raises:
        ConfigurationError: the options exclude each other, a fraction selects no batch or is of an unknown number of batches,
            or the order of the data cannot be fixed.
    """
    given = {name: value for name, value in limits.items() if value is not None}
    if overfit is not None and given:
        name, value = next(iter(given.items()))
        raise ConfigurationError(f"overfit_batches={overfit} and {name}={value}: give one of them; overfit_batches limits both")
    label = "limit_train_batches" if overfit is None else "overfit_batches"
    if divides and (overfit is not None or label in given):
        raise ConfigurationError(f"{label} beside global_batch=, which divides the samples itself: leave out one of them")
    found: dict[str, int | float] = {}
    for stage in ("train", "val"):
        name = f"limit_{stage}_batches"
        limit = given.get(name) if overfit is None else overfit
        loader = data[stage]
        if limit is None or loader is None:
            continue
        if limit == 0:
            data = {**data, stage: None}
            continue
        if overfit is not None:
            data = {**data, stage: (loader := in_order(loader, f"{stage}_data"))}
        if isinstance(limit, float):
            _check_fraction(limit, loader, name if overfit is None else "overfit_batches", f"{stage}_data")
        found[f"{stage}_data"] = limit
    return data, found


def limited_to(loader: Any, limit: float | None) -> int | None:
    """Return the most batches of a pass; None for no limit."""
    if not isinstance(limit, float):
        return limit
    length = length_of(loader)
    return None if limit == 1 or length is None else int(length * limit)


def shortest(length: int | None, limit: int | None) -> int | None:
    """Return the batches of a limited pass over ``length`` batches; None if that is unknown, because it may end earlier."""
    return length if length is None or limit is None else min(length, limit)


def _check_fraction(limit: float, loader: Any, name: str, data: str) -> None:
    length = length_of(loader)
    if length is None and limit < 1:
        raise ConfigurationError(f"{name}={limit} is a fraction, and the number of batches of {data} is unknown: give an int")
    if length is not None and not int(length * limit):
        raise ConfigurationError(
            f"{name}={limit} of the {length} batches of {data} selects none: give an int, or at least {1 / length:.2g}"
        )


def in_order(loader: Iterable[Any], name: str) -> Iterable[Any]:
    """Return a loader of the same batches in each pass, not shuffled. Lists and streams are returned as they are.

    Raises:
        ConfigurationError: a DataLoader has a class or a sampler whose order is unknown.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches: Any = loader.batch_sampler
    own = loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else batches
    sampler = _in_order(own)
    if sampler is not None and sampler is own:
        return loader
    if sampler is None or not is_plain(loader):
        unknown = own if sampler is None else loader
        raise ConfigurationError(
            f"overfit_batches cannot turn off the shuffling of {name} by {type(unknown).__name__}: give a DataLoader with "
            "shuffle=False, or a list of the batches"
        )
    sampling: dict[str, Any] = {"sampler": sampler, "batch_size": loader.batch_size}
    if batches is not None:
        sampling["drop_last"] = batches.drop_last
        sampling["batch_size"] = batches.batch_size
    return rebuilt(loader, **sampling, persistent_workers=loader.persistent_workers)


def _in_order(sampler: Any) -> Any:
    """Return a sampler of the same samples in a fixed order; None if it is unknown how."""
    kind = type(sampler)
    if kind is SequentialSampler or (kind is DistributedSampler and not sampler.shuffle):
        return sampler
    if kind is DistributedSampler:
        fixed = copy.copy(sampler)
        fixed.shuffle = False
        return fixed
    if kind is RandomSampler:
        return SequentialSampler(sampler.data_source)
    if kind is SubsetRandomSampler:
        return list(sampler.indices)
    return range(len(sampler.weights)) if kind is WeightedRandomSampler else None
