"""The share of a rank in a validation, and models whose forward pass waits for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from eventloop.checkpoint import is_sharded
from eventloop.errors import TrainingError
from eventloop.training.loaders import length_of


class Share:
    """How many samples each batch of a loader counts: none that a ``DistributedSampler`` has repeated.

    Such a sampler gives all ranks as many samples, so that the last one of some ranks is one that another has as well. A pass
    leaves it out, unless a batch would then be missing (or, with ``drop_last``, not be whole): all ranks keep as many batches,
    as the forward pass of a wrapped model may wait for the others. That batch counts nothing.

    Args:
        loader: each batch counts 1, unless it is a ``DataLoader`` with batches of one size.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._size = _batch_size(loader)
        batched: Any = getattr(loader, "batch_sampler", None)
        self._sampler: Any = None if not self._size else getattr(loader if batched is None else batched, "sampler", None)
        self._samples: int | None = length_of(self._sampler)
        self._alone = -1  # the batch that is not counted
        self._repeats = False
        sampler = self._sampler
        if self._size and isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
            self._find_repeated(sampler, self._size, drops=getattr(batched, "drop_last", False))

    def _find_repeated(self, sampler: DistributedSampler[Any], size: int, *, drops: bool) -> None:
        own = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]  # see SeededDataset
        if own >= sampler.num_samples:
            return
        if sampler.num_samples % size == (0 if drops else 1 % size):
            self._alone = (sampler.num_samples - 1) // size
        elif not drops:  # else no batch has it
            self._repeats, self._samples = True, own

    def counts(self, index: int) -> int:
        """Return the number of samples that batch ``index`` counts; 1 where it is unknown."""
        if index == self._alone:
            return 0
        if not self._size or self._samples is None:
            return 1
        return max(1, min(self._size, self._samples - index * self._size))

    def leave_out(self) -> Callable[[], object]:
        """Have passes leave out the repeated sample, if they can; return a function that ends it."""
        sampler = self._sampler
        if not self._repeats:
            return lambda: None
        before = sampler.num_samples, sampler.total_size
        sampler.num_samples, sampler.total_size = self._samples, len(sampler.dataset)

        def put_back() -> None:
            sampler.num_samples, sampler.total_size = before

        return put_back


def forward_alone(models: Iterable[torch.nn.Module], lengths: list[int | None]) -> Callable[[], object]:
    """Have the forward passes of models wait for no other rank, as ranks have another number of batches each.

    ``DistributedDataParallel`` sends rank 0's buffers to all ranks at each forward pass. It is done once, here. A collective.

    Args:
        models: of the run.
        lengths: number of batches of each rank, where it is known.

    Returns:
        What has them wait again.

    Raises:
        TrainingError: a model is sharded, so that it cannot do without the others.
    """
    waiting: list[Any] = []
    for model in models:
        if is_sharded(model) and None not in lengths:
            told = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
            raise TrainingError(
                f"the ranks have not as many batches to evaluate ({told}), and the forward pass of a sharded model needs all "
                "ranks: it would hang. Give the DataLoader a DistributedSampler (what it repeats is not counted)"
            )
        waiting += [module for module in model.modules() if _sends_buffers(module)]
    for module in waiting:
        for buffer in module.module.buffers():
            distributed.broadcast(buffer, distributed.get_global_rank(module.process_group, 0), group=module.process_group)
        module.require_forward_param_sync = False

    def wait_again() -> None:
        for module in waiting:
            module.require_forward_param_sync = True

    return wait_again


def _sends_buffers(module: Any) -> bool:
    return isinstance(module, DistributedDataParallel) and bool(module.will_sync_module_buffers())  # type: ignore[no-untyped-call]


def _batch_size(loader: Iterable[Any]) -> int | None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return 1
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None
