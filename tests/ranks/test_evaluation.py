"""Validations and tests of data that the ranks do not share evenly: each sample counts once, and no rank waits for ever."""

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from trainbus.eventloop import Run, TrainLoop
from trainbus.hooks import SyncBuffersHook

from . import jobs


class Seen:
    """A metric: the samples it was fed with."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, values: torch.Tensor) -> None:
        self.values += values.tolist()

    def compute(self) -> float:
        return len(self.values) + 0.0 * (sum(self.values) / len(self.values))  # an error where there were none

    def reset(self) -> None:
        self.values = []


class Merged(Seen):
    def merge_state(self, others: list[Seen]) -> None:
        for other in others:
            self.values += other.values


def value_of(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": batch.mean() + 0.0 * model(batch[:, None]).mean(), "values": batch}


def padded(values: list[float], batch_size: int) -> DataLoader[Any]:
    return DataLoader(torch.tensor(values), batch_size, sampler=DistributedSampler(values, shuffle=False))


def normed() -> nn.Module:
    """A model whose forward pass sends rank 0's buffers to all ranks."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))


def means() -> list[Any]:
    found = []
    for values, size in (([0.0, 3.0, 6.0], 1), ([0.0, 1.0, 8.0], 2), ([3.0], 1)):
        model, data, metrics = normed(), padded(values, size), {"merged": Merged(), "alone": Seen()}
        loop = TrainLoop(model, step=value_of, val_data=data, test_data=data, metrics=metrics)
        found += [loop.validate(), loop.test()]
        with Run(model=model) as run:
            batches = run.validate(data, metrics)
            for batch in batches:
                run.report(**value_of(model, batch))
        found.append(batches.metrics)
        assert data.sampler.total_size == 2 * data.sampler.num_samples  # as before
    return [(one["loss"], one["merged"], one["alone"]) for one in found]


def test_repeated_samples_of_a_distributed_sampler_do_not_count(ranks):
    first, second = ranks(means)
    assert first == second == [(3.0, 3.0, 2.0)] * 6 + [(3.0, 1.0, 1.0)] * 3


UNEVEN = [([2, 0], True), ([2, 0], False), ([1, 3], True), ([1, 3], False)]


def uneven() -> list[Any]:
    rank, found = jobs.rank_and_size()[0], []
    for batches, sized in UNEVEN:
        mine = [torch.full((2,), float(10 * rank + index)) for index in range(batches[rank])]
        data: Any = mine if sized else DataLoader(mine, batch_size=None, sampler=Unsized(mine))
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lambda model, batch: model(batch[:, None]).mean()  # noqa: E731
        options = {"val_data": data, "val_step": value_of, "metrics": {"merged": Merged()}, "max_epochs": 2}
        loop = TrainLoop(model, optimizer, step=step, train_data=[torch.ones(2)] * 2, **options)
        loop.bus.add(SyncBuffersHook())
        found.append((loop.run(), [buffer.tolist() for buffer in model.buffers()]))
    return found


class Unsized:
    """A sampler that does not know its length."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(range(len(self.data)))


@pytest.mark.long
def test_ranks_may_have_different_numbers_of_batches_with_buffers_to_broadcast(ranks):
    for (batches, _), (first, kept), (second, theirs) in zip(UNEVEN, *ranks(uneven), strict=True):
        values = [float(10 * rank + index) for rank, number in enumerate(batches) for index in range(number)]
        assert first == second
        assert first["loss"] == pytest.approx(sum(values) / len(values))
        assert first["merged"] == 2 * len(values)
        assert kept == theirs


def refused(batches: list[int], shard: bool) -> None:
    rank, _ = jobs.rank_and_size()
    data = list(jobs.loader(shuffle=False))[: batches[rank]]
    jobs.make_loop(None, shard=shard, val_data=data).run()


@pytest.mark.long
@pytest.mark.parametrize(
    ("batches", "shard", "told"),
    [([0, 0], False, "val_data yielded no batch"), ([2, 1], True, "rank 0: 2, rank 1: 1")],
    ids=["none at all", "a sharded model"],
)
def test_an_evaluation_error_is_raised_on_all_ranks(outcomes, batches, shard, told):
    for one in outcomes(refused, batches, shard):
        assert "TrainingError" in one.error
        assert told in one.error


def plain() -> list[tuple[str, str]]:
    data = DataLoader(torch.arange(4.0), 2)
    mine = padded([0.0, 1.0], 1)
    model = normed()
    with capture_logs() as logs:
        loop = TrainLoop(model, step=value_of, val_data=data, test_data=mine)
        loop.validate()
        loop.test()
        with Run(model=model) as run:
            for _ in run.epochs(2):
                list(run.train(data))
    return [(entry["data"], entry["event"]) for entry in logs if "data" in entry]


def test_rank_0_warns_about_a_loader_that_is_not_shared(ranks):
    first, second = ranks(plain)
    assert [data for data, _ in first] == ["val_data", "train_data"]
    assert all("every process iterates over all of this data" in told and "DistributedSampler" in told for _, told in first)
    assert second == []
