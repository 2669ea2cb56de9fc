"""Data across ranks: check that a training has as many batches on each, and count each sample of a validation once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from trainbus.eventloop.checkpoint import is_sharded
from trainbus.eventloop.errors import TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import is_joined
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.loaders import length_of

log = get_logger()


class Share:
    """Count the samples of each batch of a loader, without samples that a ``DistributedSampler`` repeats.

    The sampler pads all ranks to the same number of samples, so the last sample of some ranks is a repeat. A pass leaves the
    repeat out. If the rank would lose a batch by that, the batch stays and counts 0: forward passes of a wrapped model may
    wait for the other ranks. The batch itself tells its size if the loader is not a ``DataLoader`` with a fixed batch size.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._size = _batch_size(loader)
        batched: Any = getattr(loader, "batch_sampler", None)
        self._batched = batched is not None  # else the items of the dataset are batches
        self._sampler: Any = None if not self._size else getattr(loader if batched is None else batched, "sampler", None)
        self._samples: int | None = length_of(self._sampler)
        self._alone = -1  # index of the batch that counts 0
        self._repeats = False
        sampler, size = self._sampler, self._size
        if not (size and isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__):
            return
        own = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]  # see SeededDataset
        drops = getattr(batched, "drop_last", False)
        if own < sampler.num_samples and sampler.num_samples % size == (0 if drops else 1 % size):
            self._alone = (sampler.num_samples - 1) // size
        elif own < sampler.num_samples and not drops:  # drop_last drops the repeat
            self._repeats, self._samples = True, own

    def counts(self, index: int, batch: Any) -> int | None:
        """Return the number of samples that ``batch``, which has this index, counts; None if unknown."""
        if index == self._alone:
            return 0
        if not self._batched or not self._size or self._samples is None:
            return size_of(batch)
        return max(1, min(self._size, self._samples - index * self._size))

    def leave_out(self) -> Callable[[], object]:
        """Shorten the sampler by the repeated sample; return a function that undoes it."""
        if not self._repeats:
            return lambda: None
        attributes = vars(self._sampler)
        before = {name: attributes[name] for name in ("num_samples", "total_size")}
        attributes.update(num_samples=self._samples, total_size=len(self._sampler.dataset))
        return partial(attributes.update, before)


def size_of(batch: Any) -> int | None:
    """Return the number of samples in a batch: the common first dimension of its tensors or arrays, or None."""
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    entries = batch if isinstance(batch, list | tuple) else [batch]
    sizes: set[int | None] = {len(one) for one in entries if isinstance(one, torch.Tensor | np.ndarray) and one.ndim}
    if not sizes:  # nested tables of tensors
        sizes = {size_of(one) for one in entries if isinstance(one, Mapping)} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def check_even(ranks: Coordinator, models: Iterable[torch.nn.Module], length: int | None, loader: Any, *, first: bool) -> None:
    """Check, where an epoch begins, that all ranks train the same number of batches. A collective of some of these calls.

    In the first epoch it also checks that their samplers divide one order of the samples.

    Args:
        ranks: all processes.
        models: the models to train.
        length: batches of this rank in the epoch; None if unknown.
        loader: the loader of this rank, if there is one.
        first: True for the first epoch of a run; later ones are only checked inside ``Join``.

    Raises:
        TrainingError: torch's ``Join`` is enabled for a model, and the numbers differ or are unknown. A rank without batches
            would stay in ``Join``, and could not meet the others where the run exchanges requests and saves.
    """
    if ranks.size == 1:
        return
    joined = any(is_joined(module) for model in models for module in model.modules())
    if not (joined or first):
        return
    found = ranks.distinct((length, _seed(loader)))
    lengths, seeds = ({rank: one[at] for rank, one in found.items()} for at in (0, 1))
    if len({*seeds.values()} - {None}) > 1 and not ranks.rank:
        log.warning(
            "the samplers of the ranks have different seeds, so they divide different orders of the samples, some of which "
            "come twice and others never: give all ranks the same seed",
            id="sampler-seeds-differ",
            seeds=seeds,
        )
    numbers = ", ".join(f"rank {rank}: {'unknown' if one is None else one}" for rank, one in lengths.items())
    unknown, differ = None in lengths.values(), len({*lengths.values()}) > 1
    if joined and (unknown or differ):
        raise TrainingError(
            "a run inside torch's Join needs equal numbers of batches on all ranks, because they meet at the end of each "
            f"epoch; they have {numbers}. Give the DataLoader a DistributedSampler, or Join enable=False"
        )
    if differ and not unknown:
        log.warning(
            "the ranks have different numbers of training batches, and those with more would wait for the others: give the "
            "DataLoader a DistributedSampler, or leave the loop on all ranks after the smallest number",
            id="rank-lengths-differ",
            batches=numbers,
        )


def _seed(loader: Any) -> int | None:
    """Return the seed of a sampler that divides one order of the samples among ranks, if it shuffles."""
    sampler: Any = getattr(loader, "sampler", None)
    return sampler.seed if isinstance(sampler, DistributedSampler) and sampler.shuffle else None


def forward_alone(models: Iterable[torch.nn.Module], lengths: Mapping[int, int | None]) -> Callable[[], object]:
    """Stop forward passes from waiting for other ranks, because the ranks have different numbers of batches.

    ``DistributedDataParallel`` broadcasts rank 0's buffers at each forward pass; this does it once instead. A collective.
    Return a function that undoes it. ``lengths`` holds each different number of batches by a rank that has it, None if unknown.

    Raises:
        TrainingError: a model is sharded, so each forward pass needs all ranks.
    """
    waiting: list[Any] = []
    for model in models:
        if is_sharded(model) and None not in lengths.values():
            numbers = ", ".join(f"rank {rank}: {length}" for rank, length in lengths.items())
            raise TrainingError(
                f"the ranks have different numbers of batches to evaluate ({numbers}), and a sharded model would hang: its "
                "forward pass needs all ranks. Give the DataLoader a DistributedSampler (repeated samples are not counted)"
            )
        wrapped: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        waiting += [module for module in wrapped if module.will_sync_module_buffers()]
    for module in waiting:
        for buffer in module.module.buffers():
            distributed.broadcast(buffer, distributed.get_global_rank(module.process_group, 0), group=module.process_group)
        module.require_forward_param_sync = False

    def wait_again() -> None:
        for module in waiting:
            module.require_forward_param_sync = True

    return wait_again


def _batch_size(loader: Iterable[Any]) -> int | None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return 1
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None
