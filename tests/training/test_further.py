"""A training that goes on behind its limit, a stop or an error: its data and weights are those of one in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from trainbus.eventloop import Bus, Run, TrainLoop
from trainbus.hooks import CheckpointHook

pytestmark = [
    pytest.mark.filterwarnings("ignore:resuming reads and drops"),
    pytest.mark.filterwarnings("ignore:this resumed run has entered"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]


class Stream(IterableDataset[Any]):
    """Ten samples, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(10.0)[:, None]


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10.0)[:, None]), shuffle=True, **options)


def stateful() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(TensorDataset(torch.arange(10.0)[:, None]), shuffle=True)


class Source:
    """A part of a loader that holds its sampler and counts, as ``torchdata.nodes.SamplerWrapper`` does."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.sampler = RandomSampler(range(10), generator=generator)
        self.given = 0

    def begin(self, given: int) -> None:
        """Begin a pass, without the indices that were given already."""
        self.given = given
        self.order: Iterator[int] = iter(self.sampler)
        for _ in range(given):
            next(self.order)


class Piped:
    """A loader of parts, with a state that has no generator's."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.stages, self.saved = [Source(generator)], 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        source = self.stages[0]
        source.begin(self.saved)
        if self.saved:
            first = [*islice(source.order, 1)]
            source.order = chain(first, source.order)
            if not first:  # of that pass nothing is left
                source.begin(0)
        self.saved = 0
        return self

    def __next__(self) -> torch.Tensor:
        index = next(self.stages[0].order)
        self.stages[0].given += 1
        return torch.tensor([[float(index)]])

    def state_dict(self) -> dict[str, int]:
        return {"given": self.stages[0].given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.saved = state["given"]


LOADERS: dict[str, Callable[[], Any]] = {
    "a list": lambda: [[torch.tensor([[float(number)]])] for number in range(10)],
    "shuffled": shuffled,
    "with workers": lambda: shuffled(num_workers=1),
    "with a generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "without length": lambda: DataLoader(Stream()),
    "stateful": stateful,
    "of parts": Piped,
    "of parts, a sampler with a generator": lambda: Piped(torch.Generator().manual_seed(3)),
}


class Job:
    """A training that notes its batches."""

    def __init__(self, loader: Callable[[], Any]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = loader()
        self.seen: list[float] = []

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.seen.append(float(x.detach().sum()))
        loss: torch.Tensor = model(x).sum()
        return loss

    def own(self, limit: int, folder: Any = None, resume: str | None = None, **options: Any) -> int:
        """Train in a loop of one's own; return the number of epochs."""
        bus = Bus(CheckpointHook(1000, by_epoch=False)) if folder else Bus()
        with Run(bus, model=self.model, optimizer=self.optimizer, work_dir=folder, resume=resume) as run:
            for _ in run.epochs(max_iters=limit):
                for batch in run.train(self.loader, **options):
                    self.optimizer.zero_grad()
                    self.loss(self.model, batch).backward()
                    self.optimizer.step()
            return run.counters.epoch

    def looped(self, bus: Bus | None = None, **options: Any) -> TrainLoop:
        return TrainLoop(self.model, self.optimizer, step=self.loss, train_data=self.loader, bus=bus, **options)

    @property
    def result(self) -> tuple[list[float], list[float]]:
        return self.seen, [one.item() for one in self.model.parameters()]


@pytest.mark.parametrize("limit", [4, 10, 14, 20])
@pytest.mark.parametrize("name", LOADERS)
def test_an_own_loop_goes_on_behind_its_limit_in_the_epoch_that_the_limit_has_cut_short(tmp_path, name, limit):
    whole = Job(LOADERS[name])
    one_piece = whole.own(25, endless=True)
    first = Job(LOADERS[name])
    first.own(limit, tmp_path, endless=True)
    second = Job(LOADERS[name])
    assert second.own(25, tmp_path, resume="auto", endless=True) == one_piece
    assert first.seen + second.seen == whole.seen


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("limit", [4, 10, 14])
def test_so_it_does_where_each_pass_is_an_epoch(tmp_path, name, limit):
    whole = Job(LOADERS[name])
    assert whole.own(25) == 3
    first = Job(LOADERS[name])
    assert first.own(limit, tmp_path) == limit // 10 + bool(limit % 10)
    second = Job(LOADERS[name])
    assert second.own(25, tmp_path, resume="auto") == 3
    assert first.seen + second.seen == whole.seen


@pytest.mark.parametrize("limit", [4, 10, 14])
@pytest.mark.parametrize("name", LOADERS)
def test_a_second_call_of_a_loop_with_a_larger_limit_goes_on_in_its_data(name, limit):
    whole = Job(LOADERS[name])
    one_piece = whole.looped(max_iters=25)
    one_piece.run()
    job = Job(LOADERS[name])
    loop = job.looped(max_iters=limit)
    loop.run()
    loop.run(max_iters=25)
    assert job.result == whole.result
    assert (loop.counters.epoch, loop.counters.iter) == (one_piece.counters.epoch, 25)


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_iters": 20}], ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_a_second_call_after_a_stop_goes_on_where_the_first_one_has_ended(name, limits):
    whole = Job(LOADERS[name])
    whole.looped(**limits).run()
    job = Job(LOADERS[name])
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.stop(), once=4)
    loop = job.looped(bus, **limits)
    loop.run()
    assert len(job.seen) == 4
    loop.run()
    assert job.result == whole.result


def test_a_second_call_after_an_error_in_a_step_begins_with_the_batch_of_that_step():
    whole = Job(shuffled)
    whole.looped(max_epochs=2).run()
    job = Job(shuffled)
    loss, fails = job.loss, [True]

    def failing(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if len(job.seen) == 4 and fails:
            raise ValueError(fails.pop())
        return loss(model, batch)

    job.loss = failing  # type: ignore[method-assign]
    loop = job.looped(max_epochs=2)
    with pytest.raises(ValueError, match="True"):
        loop.run()
    loop.run()
    assert job.result == whole.result


def test_a_checkpoint_comes_before_the_place_of_the_last_run(tmp_path):
    whole = Job(shuffled)
    whole.looped(max_epochs=3).run()
    job = Job(shuffled)
    bus = Bus(CheckpointHook(1))
    bus.on("after_train_iter", lambda event: event.run.stop() if len(job.seen) == 14 else None)
    loop = job.looped(bus, max_epochs=3, work_dir=tmp_path)
    loop.run()
    loop.run(resume=tmp_path / "epoch_1.safetensors")
    assert job.seen[:10] + job.seen[14:] == whole.seen
    assert job.result[1] == whole.result[1]
