"""What ``trainbus run`` does under ``torchrun``: each process gets its share of the data; process groups are torch's."""

import gc
import os
import time
import weakref
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from trainbus.eventloop.training.distributed.collectives import Collectives
from trainbus.eventloop.training.distributed.launch import process_group, shared
from trainbus.eventloop.training.distributed.ranks import is_parallel, own_group

DATA = TensorDataset(torch.arange(10))


def together(batch: list[tuple[torch.Tensor, ...]]) -> list[int]:
    return [int(one) for (one,) in batch]


def found() -> tuple[dict[str, list[list[int]]], list[str], list[bool]]:
    return passes(), left_alone(), wrapped()


def passes() -> dict[str, list[list[int]]]:
    loaders = {
        "ordered": DataLoader(DATA, batch_size=2, collate_fn=together),
        "shuffled": DataLoader(DATA, batch_size=2, collate_fn=together, shuffle=True),
        "dropping": DataLoader(DATA, batch_size=3, collate_fn=together, drop_last=True, num_workers=1),
    }
    found = {name: shared(loader, name, seed=1) for name, loader in loaders.items()}
    assert all(shared(loader, name, seed=1) is loader for name, loader in found.items())
    return {name: list(loader) for name, loader in found.items()}


class Own(DataLoader[Any]):
    pass


def left_alone() -> list[str]:
    loaders: dict[str, Any] = {
        "list": [1, 2],
        "replacing": DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
        "batches": DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
        "unbatched": DataLoader(DATA, batch_size=None),
        "subclass": Own(DATA),
    }
    with capture_logs() as logs:
        assert all(shared(loader, name, seed=0) is loader for name, loader in loaders.items())
    return [entry["data"] for entry in logs]


def wrapped() -> list[bool]:
    model = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return [is_parallel(one) for one in (model, frozen, nn.parallel.DistributedDataParallel(model))]


def test_each_process_has_its_share_of_a_data_loader_and_what_cannot_be_shared_or_wrapped_is_unchanged(ranks):
    (first, told, parallel), (second, told_by_others, parallel_too) = ranks(found)
    assert first["ordered"] == [[0, 2], [4, 6], [8]]
    assert second["ordered"] == [[1, 3], [5, 7], [9]]
    mine, theirs = (list(chain(*batches["shuffled"])) for batches in (first, second))
    assert sorted(mine + theirs) == list(range(10))
    assert mine != sorted(mine)
    assert [len(batch) for batch in first["dropping"] + second["dropping"]] == [3, 3]
    assert told == ["list", "replacing", "batches", "unbatched", "subclass"]
    assert told_by_others == []
    assert parallel == parallel_too == [False, True, True]  # a frozen model, and one that is wrapped


@pytest.fixture
def alone(tmp_path):
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_is_created_once_and_forgotten_when_torch_destroys_it(alone):
    ranks = Collectives(own_group("control"))
    group = weakref.ref(ranks.group)
    assert own_group("control") is group()
    gc.disable()
    try:
        dist.destroy_process_group()
        assert group() is None  # its threads have ended: not when the interpreter does
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match=r"destroy_process_group\(\)"):
        ranks.gather(1)


def test_groups_have_the_users_timeout(alone):
    for group in (own_group("control"), own_group("saves")):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


def joins(folder: str, how: str) -> bool:
    """Rank 0 takes its time to connect; return whether it had connected when this rank went on."""
    rank, connected = dist.get_rank(), Path(folder, "connected")
    connect = (
        dist.new_group
        if how == "own_group"
        else partial(dist.init_process_group, "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    )

    def slowly(**options: Any) -> Any:
        group = connect(**options)
        if rank == 0:
            time.sleep(0.5)
            connected.touch()
        return group

    if how == "own_group":
        dist.new_group = slowly
        own_group("control")
        return connected.exists()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    dist.init_process_group = slowly
    with process_group():
        return connected.exists()


@pytest.mark.long
@pytest.mark.parametrize("how", ["own_group", "process_group"])
def test_no_rank_goes_on_and_may_end_before_all_have_connected(ranks, tmp_path, how):
    assert ranks(joins, str(tmp_path), how) == [True, True]
