"""What ``trainbus run`` does under ``torchrun``: each process gets its share of the data."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from eventloop.training.distributed.launch import shared
from eventloop.training.distributed.ranks import is_parallel

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
