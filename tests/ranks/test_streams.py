"""Streams and loaders with a state of their own: what a resume on as many, or on other numbers of processes goes on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from trainbus.eventloop import Bus, GlobalBatchSampler, TrainLoop
from trainbus.eventloop.training.distributed import collectives
from trainbus.hooks import CheckpointHook

from .jobs import rank_and_size

ROWS = 48


class Interleaved(IterableDataset[torch.Tensor]):
    """Each process has every n-th sample."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, size = rank_and_size()
        for row in range(rank, ROWS, size):
            yield torch.tensor([float(row)])


def loader(kind: str) -> DataLoader[Any]:
    if kind == "plain stream":
        return DataLoader(Interleaved(), batch_size=4)
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = torch.arange(float(ROWS)).unsqueeze(1)
    if kind == "global batches":
        return StatefulDataLoader(rows, batch_sampler=GlobalBatchSampler(rows, 8))
    if kind == "not divided":
        return StatefulDataLoader(rows, batch_size=4, shuffle=True)
    return StatefulDataLoader(Interleaved(), batch_size=4)


def train(folder: Path, batches: int | None, kind: str) -> list[int]:
    collectives.INTERVAL = 0
    model = nn.Linear(1, 1)
    if rank_and_size()[1] > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    bus, taken = Bus(CheckpointHook()), []
    step = lambda model, batch: model(batch).mean()  # noqa: E731
    loop = TrainLoop(model, optimizer, step=step, train_data=loader(kind), bus=bus, max_epochs=1, work_dir=folder, seed=1)

    @bus.on("after_train_iter", priority="LOWEST")
    def note(event: Any) -> None:
        taken.append(event.batch.flatten().int().tolist())
        if len(taken) == batches:
            event.run.stop()

    loop.run(resume="auto")
    return [row for batch in taken for row in batch]


@pytest.fixture
def starts(outcomes, tmp_path):
    """``starts(kind, before, after)`` stops after three batches and goes on; returns how often each sample came, and a log."""

    def run(kind: str, before: int, after: int) -> tuple[Counter[int], str]:
        if kind != "plain stream":
            pytest.importorskip("torchdata")
        seen = Counter[int]()
        for size, batches in ((before, 3), (after, None)):
            ended = outcomes(train, tmp_path / "run", batches, kind, size=size)
            assert not any(one.exitcode for one in ended), "\n".join(one.output for one in ended)
            for one in ended:
                seen.update(one.value)
        return seen, ended[0].output

    return run


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain stream", "stateful stream"])
def test_a_stream_goes_on_exactly_with_as_many_processes(starts, kind):
    seen, _ = starts(kind, 2, 2)
    assert seen == Counter(range(ROWS))


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_global_batches_go_on_exactly_also_in_a_loader_with_a_state_of_one_process(starts, before, after):
    seen, _ = starts("global batches", before, after)
    assert seen == Counter(range(ROWS))


@pytest.mark.parametrize("kind", ["plain stream", "stateful stream"])
def test_a_stream_on_another_number_of_processes_is_warned_of_with_the_number_that_saved(starts, kind):
    seen, output = starts(kind, 2, 1)
    assert set(seen.values()) == {1, 2}
    assert "inside an epoch of a stream" in output
    assert "saved=2" in output


def test_a_stateful_loader_that_gives_all_data_to_each_process_is_warned_of(starts):
    seen, output = starts("not divided", 1, 2)
    assert max(seen.values()) > 1
    assert "give its DataLoader a DistributedSampler" in output
