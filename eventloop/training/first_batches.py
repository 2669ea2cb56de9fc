"""Read the first batches of a loader without changing it: its position, its samplers, random generators and workers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from eventloop.training.loaders import has_state, is_plain, rebuilt

_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class _WouldChange(Exception):  # noqa: N818 - it is no error
    """Reading would change what is read."""


def first_batches(loader: Iterable[Any], count: int) -> list[Any] | None:
    """Return up to ``count`` batches; None if reading could consume the data or change the order of later passes.

    A DataLoader is rebuilt with a copy of its sampler, and with at most ``count`` workers, which end. The copies share the
    data. The global random states and those of the loader's own ``generator`` advance: the caller restores them.
    """
    try:
        return list(islice(_fresh(loader, count), count))
    except _WouldChange:
        return None


def _fresh(loader: Any, count: int) -> Iterator[Any]:
    """Return an iterator over batches that are not the loader's own."""
    if isinstance(loader, list | tuple):
        return iter(_copied(loader[:count], copy.deepcopy))  # a step may change a batch in place
    if isinstance(loader, DataLoader) and is_plain(loader) and not has_state(loader):
        return iter(_rebuilt(loader, count))
    if isinstance(loader, DataLoader) or hasattr(loader, "base_dataloader"):
        raise _WouldChange  # a subclass with workers and counts of its own
    return _passed(_apart(loader))


def _rebuilt(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    dataset: Any = loader.dataset
    own = _apart(dataset) if isinstance(dataset, Dataset) else dataset
    options: dict[str, Any] = {"dataset": own, "num_workers": min(count, loader.num_workers)}
    if isinstance(dataset, IterableDataset):
        if not loader.num_workers:
            _passed(own)
        return rebuilt(loader, **options, batch_size=loader.batch_size, drop_last=loader.drop_last)
    if loader.batch_sampler is None:
        return rebuilt(loader, **options, batch_size=None, sampler=_drawn(loader.sampler, dataset, count))
    return rebuilt(loader, **options, batch_sampler=_drawn(loader.batch_sampler, dataset, count))


def _drawn(sampler: Any, dataset: Any, count: int) -> list[Any]:
    """Return the first indices (or batches of them) of a copy of the sampler, which shares the dataset."""
    if isinstance(sampler, Iterator) or has_state(sampler):
        raise _WouldChange
    return list(islice(_copied(sampler, lambda one: copy.deepcopy(one, {id(dataset): dataset})), count))


def _passed(source: Any) -> Iterator[Any]:
    """Begin a pass; raise if all passes share one iterator."""
    first: Iterator[Any] = iter(source)
    second = iter(source)
    if first is second:
        raise _WouldChange
    return first


def _apart(source: Any) -> Any:
    """Copy a dataset or loader: the copy shares the data, but has its own attributes, generators and inner datasets."""
    if isinstance(source, Iterator) or has_state(source):
        raise _WouldChange
    made = _copied(source, copy.copy)
    for name, value in getattr(source, "__dict__", {}).items():
        if isinstance(value, Iterator):  # an open file or stream, too
            raise _WouldChange
        if isinstance(value, _GENERATORS):
            vars(made)[name] = copy.deepcopy(value)
        elif isinstance(value, Dataset):
            vars(made)[name] = _apart(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):
            vars(made)[name] = type(value)(map(_apart, value))
    return made


def _copied(source: Any, by: Any) -> Any:
    try:
        return by(source)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # such as a file, a lock, or a tensor within a graph
        raise _WouldChange from error
