"""Each sample once per epoch, whatever number of processes and global batch each start has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, ConfigurationError, GlobalBatchSampler, Run, TrainLoop, Update
from trainbus.eventloop.training.distributed import collectives, samples
from trainbus.hooks import CheckpointHook, OptimizerHook

from .jobs import rank_and_size, weights

ROWS = 47


@given(st.data())
def test_any_sequence_of_starts_takes_each_sample_of_an_epoch_at_most_once_and_to_its_end_all(data):
    rows, epoch, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    used, seen = 0, Counter[int]()
    while used < rows:
        size = data.draw(st.integers(1, min(4, rows - used)))
        whole, most = data.draw(st.integers(size, 20)), data.draw(st.none() | st.integers(1, 5))
        starts = []
        for rank in range(size):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(samples, "world_size", lambda size=size: size)
                patch.setattr(samples, "this_rank", lambda rank=rank: rank)
                starts.append(GlobalBatchSampler(range(rows), whole, batch_size=most, seed=seed))
        batches = []
        for one in starts:
            one.set_epoch(epoch)
            before = one.begin_at(used)
            batches.append(list(one))
            assert len(one) - before == len(batches[-1]) == len(batches[0])
            assert all(batches[-1])
        taken = data.draw(st.integers(1, len(batches[0])))
        seen.update(index for mine in batches for batch in mine[:taken] for index in batch)
        used = starts[0].samples_before(before + taken)
        assert seen.total() == used
        assert all(one.samples_before(before + taken) == used for one in starts)
    assert seen == Counter(range(rows))


def test_samples_that_are_too_few_for_all_processes_are_left_out_and_logged(monkeypatch, logs):
    monkeypatch.setattr(samples, "world_size", lambda: 4)
    one = GlobalBatchSampler(range(30), 9)
    assert one.begin_at(28) == len(one)
    assert list(one) == []
    assert [entry["samples"] for entry in logs if "left out" in entry["event"]] == [2]


@given(rows=st.integers(3, 40), size=st.integers(1, 3), whole=st.integers(3, 20), most=st.none() | st.integers(1, 5))
def test_the_same_start_goes_on_with_the_same_batches(rows, size, whole, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "world_size", lambda: size)
        patch.setattr(samples, "this_rank", lambda: size - 1)
        one = GlobalBatchSampler(range(rows), whole, batch_size=most)
    batches = list(one)
    for done in range(len(batches) + 1):
        one.set_epoch(0)
        assert one.begin_at(one.samples_before(done)) == done
        assert (list(one), len(one)) == (batches[done:], len(batches))


Trained = tuple[dict[str, torch.Tensor], list[tuple[int, list[int]]], int]


def train(folder: Path, batches: int | None, options: dict[str, Any]) -> Trained:
    """Train for this number of batches; return the weights, the epoch and the samples of each batch, and the accumulation."""
    collectives.INTERVAL = 0
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    if rank_and_size()[1] > 1:
        model = DistributedDataParallel(model)
    taken: list[tuple[int, list[int]]] = []
    rows = torch.arange(float(ROWS)).unsqueeze(1)
    bus = Bus(CheckpointHook())
    loop = TrainLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        step=lambda model, batch: model(batch[0]).mean(),
        train_data=DataLoader(TensorDataset(rows), batch_size=4, shuffle=True, num_workers=options.pop("num_workers", 0)),
        bus=bus,
        max_epochs=2,
        work_dir=folder,
        seed=1,
        **options,
    )

    @bus.on("after_train_iter", priority="LOWEST")
    def note(event: Any) -> None:
        taken.append((event.progress.epoch, event.batch[0].flatten().int().tolist()))
        if len(taken) == batches:
            event.run.stop()

    loop.run(resume="auto")
    return weights(loop.model), taken, next(hook.accumulate for hook in bus.hooks if isinstance(hook, Update))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_goes_on_with_other_processes_and_batches_takes_the_rest_of_its_epoch(ranks, tmp_path, workers):
    starts = [(2, 16, 2), (1, 16, 3), (2, 8, 4), (1, 12, None)]  # processes, global batch, batches
    seen: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for size, global_batch, batches in starts:
        options = {"global_batch": global_batch, "num_workers": workers}
        for _, taken, _ in ranks(train, tmp_path / "run", batches, options, size=size):
            assert taken, (size, global_batch)
            for epoch, rows in taken:
                seen[epoch].update(rows)
    assert seen == {0: Counter(range(ROWS)), 1: Counter(range(ROWS))}


def test_a_loop_of_ones_own_and_endless_passes_take_each_sample_once_too(tmp_path):
    def batches() -> DataLoader[Any]:
        sampler = GlobalBatchSampler(range(ROWS), 10, batch_size=4)
        return DataLoader(torch.arange(ROWS), batch_sampler=sampler)

    seen = Counter[int]()
    for last in (7, None):  # within the third global batch of five
        with Run(Bus(CheckpointHook()), model=nn.Linear(1, 1), work_dir=tmp_path / "own", resume="auto") as run:
            for _ in run.epochs(1):
                for i, batch in enumerate(run.train(batches())):
                    seen.update(batch.tolist())
                    if i == last:
                        run.stop()
    assert seen == Counter(range(ROWS))

    seen.clear()
    for last in (18, 45, None):
        with Run(Bus(CheckpointHook()), model=nn.Linear(1, 1), work_dir=tmp_path / "endless", resume="auto") as run:
            for _ in run.epochs(max_iters=4 * 14):  # four passes
                for batch in run.train(batches(), endless=True):
                    seen.update(batch.tolist())
                    if run.progress.iter == last:
                        run.stop()
    assert seen == Counter([*range(ROWS)] * 4)


@pytest.mark.long
def test_the_weights_do_not_depend_on_the_number_of_processes(ranks, tmp_path):
    ((one, _, accumulates),) = ranks(train, tmp_path / "one", 12, {"global_batch": 8}, size=1)
    two = ranks(train, tmp_path / "two", 6, {"global_batch": 8}, size=2)
    assert accumulates == 2
    for found, _, accumulates in two:
        assert accumulates == 1
        torch.testing.assert_close(found, one)


@pytest.mark.long
def test_a_resumed_run_of_the_same_size_is_bitwise_the_same(ranks, tmp_path):
    ((whole, _, _),) = ranks(train, tmp_path / "whole", None, {"global_batch": 12}, size=1)
    for batches in (5, None):
        ((found, _, _),) = ranks(train, tmp_path / "parts", batches, {"global_batch": 12, "num_workers": 1}, size=1)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_what_cannot_be_divided_is_an_error_when_the_run_begins():
    model, loader = nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    options: dict[str, Any] = {"step": lambda model, batch: model(batch[0]).mean(), "max_epochs": 1}

    def run(data: Any, *hooks: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        TrainLoop(model, optimizer, train_data=data, bus=Bus(*hooks), global_batch=8, **options).run()

    with pytest.raises(ConfigurationError, match=r"GlobalBatchSampler\(dataset, 8\)"):
        run([torch.ones(2, 1)])
    with pytest.raises(ConfigurationError, match=r"accumulate=3 .* 4 micro-batches"):
        run(loader, OptimizerHook(accumulate=3))
    for wrong in ({"global_batch": 0}, {"global_batch": 8, "batch_size": 0}, {"global_batch": 8, "batch_size": "4"}):
        with pytest.raises(ConfigurationError, match=[*wrong][-1]):
            GlobalBatchSampler(range(40), **wrong)
    with pytest.raises(ConfigurationError, match="4 samples"):
        GlobalBatchSampler(range(4), 8, drop_last=True)
    run(loader, OptimizerHook(accumulate=4))
