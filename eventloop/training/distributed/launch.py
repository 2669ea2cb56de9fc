"""Set up ``trainbus run`` under ``torchrun``: process group, devices, and a share of the data per rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import timedelta
from typing import Any, Final, TypeGuard, cast

from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from trainbus.eventloop.device import current_device, use_device
from trainbus.eventloop.errors import ConfigurationError, RunPreempted, TrainbusError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.coordinator import Coordinator, T
from trainbus.eventloop.training.distributed.collectives import Collectives
from trainbus.eventloop.training.distributed.layout import DataRank, RankLayout
from trainbus.eventloop.training.distributed.ranks import record_failure, wait_until_connected
from trainbus.eventloop.training.distributed.samples import GlobalBatchSampler, global_sampler
from trainbus.eventloop.training.loaders import rebuilt
from trainbus.eventloop.user_errors import contextmanager
from trainbus.eventloop.world import is_joined, this_rank, world_size

_TIMEOUT: Final = timedelta(minutes=10)
"""How long a process waits for one that is silent: torch's own limit for NCCL. That for gloo is 30 minutes."""

log = get_logger()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that ``torchrun`` started, and destroy the group at the end; do nothing without ``torchrun``.

    The backend is torch's for the accelerator (NCCL on GPUs), and gloo on the CPU. After an error the group stays until the
    process ends, which ends the other processes.
    """
    if not (distributed.is_available() and distributed.is_torchelastic_launched()) or is_joined():
        yield
        return
    use_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        distributed.init_process_group(timeout=_TIMEOUT)
        wait_until_connected()
        yield
    except RunPreempted:  # on all ranks
        distributed.destroy_process_group()
        raise
    except BaseException as error:
        record_failure(error)
        raise
    distributed.destroy_process_group()


def from_ranks(find: Callable[[], T]) -> list[T]:
    """Return the different results of ``find`` on the ranks where it succeeds; raise a TrainbusError if none. A collective."""
    found: Any
    try:
        found = find()
    except TrainbusError as error:
        found = error
    group = distributed.group.WORLD if world_size() > 1 else None
    everyones = [*(Coordinator() if group is None else Collectives(group)).distinct(found).values()]
    good = [one for one in everyones if not isinstance(one, TrainbusError)]
    if not good:
        raise everyones[0]
    return good


def own_device(device: Any) -> Any:
    """Return the accelerator of this process for its type, such as ``"cuda"``; any other device unchanged."""
    own = current_device() if is_joined() else None
    return str(own) if own is not None and own.type == str(device) else device


def shared(loader: Iterable[Any], name: str, seed: int) -> Iterable[Any]:
    """Return a loader of this rank's share of the data; ``seed`` sets the order and must be equal on all ranks.

    A sequential or shuffled ``DataLoader`` gets a ``DistributedSampler``; its batch size stays per rank. Others stay.
    """
    if world_size() == 1 or callable(getattr(getattr(loader, "sampler", None), "set_epoch", None)):
        return loader
    if not _is_plain(loader):
        if this_rank() == 0:
            log.warning(
                "this is not a plain DataLoader, so it must give each process its own batches",
                id="loader-without-sampler",
                data=name,
            )
        return loader
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, shuffle=isinstance(loader.sampler, RandomSampler), seed=seed, drop_last=loader.drop_last
    )
    kept = {part: getattr(loader, part) for part in ("batch_size", "drop_last", "persistent_workers")}
    return rebuilt(loader, sampler=sampler, **kept)


def divided(loader: Iterable[Any], global_batch: int, seed: int, place: DataRank) -> DataLoader[Any]:
    """Return a loader of this rank's share of global batches, each at most ``loader``'s batch size, in an order from ``seed``.

    Raises:
        ConfigurationError: it is not a plain DataLoader of a map-style dataset, or has other global batches.
    """
    own = global_sampler(loader)
    if own is not None and own.global_batch == global_batch:
        return loader  # type: ignore[return-value]  # only a DataLoader has one
    if own is not None or not _is_plain(loader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"global_batch={global_batch} needs train_data=DataLoader(dataset, batch_size=..., shuffle=...) of a map-style "
            f"dataset, or with batch_sampler=GlobalBatchSampler(dataset, {global_batch}), not {loader!r}"
        )
    sampler = GlobalBatchSampler(
        cast("Sized", loader.dataset),
        global_batch,
        batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=seed,
        drop_last=loader.drop_last,
        num_replicas=place.size,
        rank=place.rank,
    )
    return rebuilt(loader, batch_sampler=sampler, persistent_workers=loader.persistent_workers)


def check_sampler(loader: Iterable[Any], name: str, layout: RankLayout) -> None:
    """Warn about a ``DataLoader`` that gives all of the data to every process; check which ranks its sampler divides it among.

    Raises:
        ConfigurationError: processes that hold one copy of the model together would get different samples, or others the same.
    """
    data = layout.data
    sampler: Any = global_sampler(loader) or getattr(loader, "sampler", None)
    divides = isinstance(sampler, GlobalBatchSampler | DistributedSampler)
    if layout.problem and isinstance(sampler, GlobalBatchSampler):
        raise ConfigurationError(f"{name} has a GlobalBatchSampler, and {layout.problem}")
    if layout.problem:
        return  # it is told when the run begins
    if divides and data.shares and (sampler.num_replicas, sampler.rank) != (data.size, data.rank):
        raise ConfigurationError(
            f"the sampler of {name} divides the samples among {sampler.num_replicas} processes (this one is number "
            f"{sampler.rank}), but the models have {data.size} copies (this process is a part of number {data.rank}), and "
            'processes of one copy need the same samples: give the sampler num_replicas=mesh["dp"].size() and '
            'rank=mesh["dp"].get_local_rank(), where "dp" is the dimension of the copies. If each of them trains on batches of '
            "its own, say so to the run: data_mesh= with all processes"
        )
    if data.size > 1 and not this_rank() and (_is_plain(loader) or _is_plain_of_torchdata(loader)):
        log.warning(
            "every process iterates over all of this data; give its DataLoader a DistributedSampler, unless each process has "
            "its own dataset",
            id="data-not-distributed",
            data=name,
            **({"num_replicas": data.size} if data.shares else {}),
        )


def _is_plain(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return True for a DataLoader that yields each sample once per pass, in order or shuffled."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    once = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return once or type(sampler) is SequentialSampler


def _is_plain_of_torchdata(loader: Any) -> bool:
    """Return True for a ``StatefulDataLoader`` with samplers of its own, which are no subclasses of torch's."""
    parts = (loader, loader.sampler) if isinstance(loader, DataLoader) else (loader,)
    ours = [type(part).__module__.startswith("torchdata.") for part in parts]
    return ours[0] and (ours[-1] or type(parts[-1]) is SequentialSampler)
