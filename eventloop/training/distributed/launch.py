"""What ``trainbus run`` does under ``torchrun``: a process group, the model wrapped, a share of the data for each process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from eventloop.checkpoint import is_sharded
from eventloop.log import get_logger
from eventloop.training.distributed.ranks import this_rank, world_size
from eventloop.training.loaders import rebuilt

log = get_logger()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that ``torchrun`` has started, and part when the work is done; nothing in a process of its own.

    Each device gets its own backend, NCCL on GPUs and gloo on the CPU. After an error the group is left to the end of the
    process, which ends the others, too.
    """
    if not (distributed.is_available() and distributed.is_torchelastic_launched()) or distributed.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    distributed.init_process_group()
    yield
    distributed.destroy_process_group()


def local_rank() -> int:
    """Return the number of this process on its machine, as ``torchrun`` has given it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def from_first(value: Any) -> Any:
    """Return rank 0's value on all ranks. A collective."""
    if world_size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def own_device(device: Any) -> Any:
    """Return the device of this process: of ``"cuda"`` the GPU with its number, any other as it is."""
    if distributed.is_initialized() and str(device) == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return device


def is_parallel(model: torch.nn.Module) -> bool:
    """True for a model that is wrapped or sharded already, and for one with nothing to train."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return not trains or isinstance(model, DistributedDataParallel) or is_sharded(model)


def shared(loader: Iterable[Any], name: str, seed: int) -> Iterable[Any]:
    """Return a loader of this process's share of the data.

    A ``DataLoader`` in order or shuffled gets a ``DistributedSampler``. Its batches stay as large as they are: together, the
    processes take so many of them at once. Anything else is taken as it is.

    Args:
        loader: of all data.
        name: of the loader in messages.
        seed: of the order, the same on all ranks.
    """
    if world_size() == 1 or callable(getattr(getattr(loader, "sampler", None), "set_epoch", None)):
        return loader
    if not _is_plain(loader):
        if this_rank() == 0:
            log.warning("no plain DataLoader: it has to give each process batches of its own by itself", data=name)
        return loader
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, shuffle=isinstance(loader.sampler, RandomSampler), seed=seed, drop_last=loader.drop_last
    )
    kept = {part: getattr(loader, part) for part in ("batch_size", "drop_last", "persistent_workers", "in_order")}
    return rebuilt(loader, sampler=sampler, **kept)


def warn_if_all(loader: Iterable[Any], name: str) -> None:
    """Warn of a ``DataLoader`` that gives every process all of the data.

    Args:
        loader: of a run.
        name: of it in the warning.
    """
    if world_size() > 1 and not this_rank() and _is_plain(loader):
        log.warning(
            "every process goes through all of this data, as its DataLoader has no DistributedSampler; give it one, unless the "
            "dataset is another one in each process",
            data=name,
        )


def _is_plain(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """True for a DataLoader that goes through its dataset once in each pass, in order or shuffled."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    once = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return once or type(sampler) is SequentialSampler
