"""SyncBuffersHook: buffers are the mean over all ranks after each training epoch. Two real processes, gloo."""

from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.ranks.conftest import on_ranks
from trainbus.eventloop import Bus, Run
from trainbus.hooks import SyncBuffersHook


class Buffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("short", torch.full((2, 2), float(rank), dtype=torch.bfloat16))
        self.register_buffer("wave", torch.full((2,), complex(0, rank)))
        self.register_buffer("seen", torch.tensor(5 + 2 * rank))
        self.register_buffer("mask", torch.tensor([rank == 0]))
        self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).t() + rank)
        self.register_buffer("empty", torch.empty(0))


def train():
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    model, bus = Buffers(rank), Bus()
    bus.add(SyncBuffersHook())
    before: list[Any] = []
    bus.on("after_train_epoch", lambda event: before.append(copy(event.run.model)), priority=10)
    with Run(bus, model=model) as run:
        for _ in run.epochs(1):
            for batch in run.train([torch.randn(4, 3) + 10 * rank]):
                model.norm(batch)
    after = copy(model)
    with Run(bus, model=model) as run:
        for _ in run.epochs(max_iters=2):
            for index, batch in enumerate(run.train([torch.randn(4, 3) + 10 * rank] * 2)):
                model.norm(batch)
                if index == 0:
                    validation = run.validate([batch])
                    validated = [copy(model) for _ in validation]
    return {"before": before[0], "after": after, "validated": validated[0]}


def copy(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    outcomes = on_ranks(train, folder=tmp_path_factory.mktemp("ranks"))
    assert [one.exitcode for one in outcomes] == [0, 0], "\n".join(one.output for one in outcomes)
    return [one.value for one in outcomes]


@pytest.mark.parametrize("name", ["norm.running_mean", "norm.running_var", "short", "wave", "strided"])
def test_both_ranks_have_the_mean_afterwards(ranks, name):
    first, second = (rank["before"][name] for rank in ranks)
    assert not torch.equal(first, second)
    for rank in ranks:
        torch.testing.assert_close(rank["after"][name], (first + second) / 2)


def test_counts_are_averaged_too_and_stay_integers_and_booleans_are_unchanged(ranks):
    assert [rank["after"]["seen"].item() for rank in ranks] == [6, 6]
    assert [rank["after"]["norm.num_batches_tracked"].item() for rank in ranks] == [1, 1]
    assert ranks[0]["after"]["seen"].dtype == torch.int64
    assert [rank["after"]["mask"].item() for rank in ranks] == [True, False]


def test_a_validation_within_an_epoch_sees_the_mean_too(ranks):
    first, second = (rank["validated"] for rank in ranks)
    assert torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    assert not torch.equal(first["norm.running_mean"], ranks[0]["after"]["norm.running_mean"])


def test_a_single_process_changes_nothing(job):
    with_hook, without = job.loop(SyncBuffersHook()), job.loop()
    with_hook.run()
    without.run()
    assert job.same(job.weights(with_hook.model), job.weights(without.model))
