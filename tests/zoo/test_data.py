"""Samplers and loaders: a training that is killed and resumed sees the batches that the whole one sees, or it says so."""

from __future__ import annotations

import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainbus import Bus, Run
from trainbus.hooks import CheckpointHook, DistSamplerSeedHook

from .kit import DIE, EPOCHS, SAVE, Killed, Outcome, seed_all

SIZE, BATCH = 16, 4


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(SIZE))


class Drawing(Dataset):
    """Draws a random number for each sample, by torch, NumPy and Python."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), np.random.rand(), random.random()


class Stream(IterableDataset):
    """A stream without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class ShuffledStream(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class Bucketed(torch_data.Sampler):
    """Yields batches of several sizes, shuffled by a generator of its own and the epoch, and can save its position.

    It has the shape of the samplers of lhotse: ``set_epoch``, ``state_dict``, ``load_state_dict``.
    """

    def __init__(self) -> None:
        self.epoch, self.given = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self.epoch).sample(range(SIZE), SIZE)
        batches = [order[0:2], order[2:5], order[5:9], order[9:16]]
        for batch in batches[self.given :]:
            self.given += 1
            yield batch
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class OwnGenerator(torch_data.Sampler):
    """A batch sampler that is shuffled by a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return SIZE // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.generator.permutation(SIZE).reshape(-1, BATCH).tolist())


class Counting:
    """An iterable of a user's own, with a state."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        while self.given % 4 < 4:
            self.given += 1
            yield self.given
            if self.given % 4 == 0:
                return

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


ARGUMENTS: dict[str, Callable[[], Any]] = {
    "data_source": numbers,
    "indices": lambda: [*range(3, 15)],
    "weights": lambda: torch.arange(1.0, SIZE + 1),
    "num_samples": lambda: SIZE,
    "dataset": numbers,
}


def _samplers() -> dict[str, Callable[[], Any]]:
    """Return a loader for each sampler of torch, by its name; arguments are those it needs."""
    made: dict[str, Callable[[], Any]] = {}
    for name, kind in sorted(vars(torch_data).items()):
        if not (inspect.isclass(kind) and issubclass(kind, torch_data.Sampler)) or name in ("Sampler", "BatchSampler"):
            continue
        needed = [key for key, each in inspect.signature(kind).parameters.items() if each.default is inspect.Parameter.empty]
        given = lambda needed=needed: {key: ARGUMENTS[key]() for key in needed}  # noqa: E731
        more: dict[str, Any] = {"num_replicas": 2, "rank": 0} if name == "DistributedSampler" else {}

        def sampled(kind: Any = kind, given: Any = given, more: Any = more, **options: Any) -> Any:
            return kind(**given(), **more, **options)

        made[name] = lambda s=sampled: DataLoader(numbers(), 2, sampler=s())
        made[f"BatchSampler of {name}"] = lambda s=sampled: DataLoader(
            numbers(), batch_sampler=torch_data.BatchSampler(s(), 2, drop_last=True)
        )
        if "generator" in inspect.signature(kind).parameters:
            made[f"{name} with a generator"] = lambda s=sampled: DataLoader(
                numbers(), 2, sampler=s(generator=torch.Generator().manual_seed(7))
            )
    return made


LOADERS: dict[str, Callable[[], Any]] = {
    **_samplers(),
    "RandomSampler with replacement": lambda: DataLoader(
        numbers(), BATCH, sampler=torch_data.RandomSampler(numbers(), replacement=True, num_samples=24)
    ),
    "shuffle": lambda: DataLoader(numbers(), BATCH, shuffle=True),
    "shuffle, a generator": lambda: DataLoader(numbers(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "shuffle, a batch that is not full": lambda: DataLoader(numbers(), 5, shuffle=True),
    "shuffle, 2 workers": lambda: DataLoader(numbers(), BATCH, shuffle=True, num_workers=2),
    "shuffle, 2 persistent workers": lambda: DataLoader(numbers(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "no batches": lambda: DataLoader(numbers(), batch_size=None, shuffle=True),
    "samples with random numbers": lambda: DataLoader(Drawing(), BATCH, shuffle=True),
    "samples with random numbers, 2 workers": lambda: DataLoader(Drawing(), BATCH, shuffle=True, num_workers=2),
    "a stream": lambda: DataLoader(Stream(), BATCH),
    "a shuffled stream": lambda: DataLoader(ShuffledStream(), BATCH),
    "a stream, 2 workers": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "a sampler of batches with a state": lambda: DataLoader(numbers(), sampler=Bucketed(), batch_size=None),
    "a batch sampler with a state": lambda: DataLoader(numbers(), batch_sampler=Bucketed()),
    "a batch sampler with a generator of its own": lambda: DataLoader(numbers(), batch_sampler=OwnGenerator()),
    "a list": lambda: [*range(5)],
    "a tuple of tensors": lambda: torch.arange(12).view(4, 3).unbind(),
    "a range": lambda: range(4),
    "an iterable with a state": Counting,
    "islice of a loader": lambda: _Again(lambda: itertools.islice(DataLoader(numbers(), BATCH, shuffle=True), 3)),
    "zip of two loaders": lambda: _Again(
        lambda: zip(DataLoader(numbers(), BATCH, shuffle=True), DataLoader(numbers(), 2, shuffle=True), strict=False)
    ),
    "ConcatDataset": lambda: DataLoader(torch_data.ConcatDataset([numbers(), numbers()]), 8, shuffle=True),
    "random_split": lambda: DataLoader(
        torch_data.random_split(numbers(), [12, 4], torch.Generator().manual_seed(1))[0], 3, shuffle=True
    ),
}
try:
    from torchdata import nodes
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    pass
else:
    LOADERS |= {
        "torchdata: StatefulDataLoader": lambda: StatefulDataLoader(numbers(), BATCH, shuffle=True),
        "torchdata: StatefulDataLoader, 2 workers": lambda: StatefulDataLoader(numbers(), BATCH, shuffle=True, num_workers=2),
        "torchdata: StatefulDataLoader of a stream": lambda: StatefulDataLoader(Stream(), BATCH),
        "torchdata: StatefulDataLoader of samples with random numbers": lambda: StatefulDataLoader(
            Drawing(), BATCH, shuffle=True
        ),
    }

    def piped(sampler: Any, *stages: Callable[[Any], Any]) -> Any:
        node = nodes.Batcher(nodes.SamplerWrapper(sampler), 2)
        for stage in stages:
            node = stage(node)
        return nodes.Loader(node)

    STAGES: dict[str, Callable[[Any], Any]] = {
        "Prefetcher": lambda node: nodes.Prefetcher(node, 2),
        "ParallelMapper": lambda node: nodes.ParallelMapper(node, tuple, num_workers=2, method="thread"),
        "Unbatcher, Batcher": lambda node: nodes.Batcher(nodes.Unbatcher(node), 3, drop_last=False),
    }
    for kind, loaded in _samplers().items():
        if not kind.startswith("BatchSampler"):
            LOADERS[f"torchdata: nodes.Loader of {kind}"] = lambda loaded=loaded: piped(loaded().sampler)
    for kind, stage in STAGES.items():
        LOADERS[f"torchdata: nodes.{kind} of a sampler with a generator"] = lambda stage=stage: piped(
            torch_data.RandomSampler(numbers(), generator=torch.Generator().manual_seed(7)), stage
        )
    LOADERS["torchdata: nodes.MultiNodeWeightedSampler"] = lambda: nodes.Loader(
        nodes.MultiNodeWeightedSampler(
            {
                key: nodes.SamplerWrapper(torch_data.RandomSampler(numbers(), generator=torch.Generator().manual_seed(seed)))
                for seed, key in enumerate("ab")
            },
            {"a": 0.3, "b": 0.7},
            seed=5,
        )
    )


class _Again:
    """An iterable that makes its iterator by a function, as a user's own does."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.__iter = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__iter())


def read(loader: Any) -> list[str]:
    """Read all batches as a loop without trainbus does."""
    seed_all(1)
    batches = []
    for epoch in range(EPOCHS):
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        batches += [repr(batch) for batch in loader]
    return batches


def trained(make: Callable[[], Any], folder: Any, *, die: bool = False, resume: bool = False) -> list[str]:
    """Read them in a run."""
    seed_all(99 if resume else 0)
    loader, seen = make(), []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_all(1)
    bus = Bus(CheckpointHook(interval=SAVE, by_epoch=False), DistSamplerSeedHook())
    with Run(bus, model=model, optimizer=optimizer, work_dir=folder, resume="auto" if resume else None) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.train(loader):
                if die and run.counters.iter == DIE:
                    raise Killed
                seen.append(repr(batch))
                optimizer.zero_grad()
                model(torch.ones(1)).sum().backward()
                optimizer.step()
    return seen


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_each_loader_goes_on_where_it_was_or_says_that_it_cannot(name, tmp_path, row):
    make = LOADERS[name]
    seed_all(0)
    whole = read(make())
    assert trained(make, tmp_path / "whole") == whole, "trainbus changes the order of the data"
    with pytest.raises(Killed):
        trained(make, tmp_path / "ours", die=True)
    with capture_logs() as lines, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        seen = trained(make, tmp_path / "ours", resume=True)
    told = [line["event"] for line in lines if line["log_level"] == "warning" or "random numbers" in line["event"]]
    told += [str(warning.message) for warning in warned if "resum" in str(warning.message)]
    outcome = "exact" if seen == whole[SAVE:] else f"told: {told[0]}" if told else "silent"
    row("samplers and loaders", name, "", "own loop", Outcome(outcome, ""))
    assert outcome != "silent", (seen, whole[SAVE:])
