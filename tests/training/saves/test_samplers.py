"""Samplers of the user's own: their state is saved, or it is told that it is not; sequences are skipped by index."""

import random
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CheckpointHook

ROWS = 24


class Order:
    """Draws the order of an epoch from a generator in an attribute."""

    def __init__(self, size=1):
        self.size = size
        self.rng = random.Random(3)

    def order(self):
        return self.rng.sample(range(ROWS), ROWS)

    def __iter__(self):
        order = self.order()
        batches = [order[at : at + self.size] for at in range(0, ROWS, self.size)]
        yield from batches if self.size > 1 else order

    def __len__(self):
        return ROWS // self.size


class Global(Order):
    """Draws from the global generator, and keeps what it has drawn."""

    def order(self):
        self.drawn = torch.randperm(ROWS).tolist()
        return self.drawn


class Counting(Order):
    """Counts its epochs, and tells nobody."""

    epoch = 0

    def order(self):
        self.epoch += 1
        return random.Random(self.epoch).sample(range(ROWS), ROWS)


class InPlace(Order):
    """Shuffles the order of the epoch before."""

    def __init__(self, size=1):
        super().__init__(size)
        self.places = list(range(ROWS))

    def order(self):
        random.shuffle(self.places)
        return list(self.places)


class Hidden(Order):
    """Has its generator where no one looks."""

    def __init__(self, size=1):
        super().__init__(size)
        self.inner = Order()

    def order(self):
        return self.inner.order()


class Told(Order):
    """Is told its epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return random.Random(self.epoch).sample(range(ROWS), ROWS)


class Stateful(Counting):
    """Goes on by itself, as those of lhotse: also with the end of a pass that is complete."""

    position = 0
    restored = False

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position, self.restored = state["epoch"] - 1, state["position"], True

    def __iter__(self):
        if not self.restored:
            self.position = 0
        self.restored = False
        for one in list(super().__iter__())[self.position :]:
            self.position += 1
            yield one


class Anew(Stateful):
    """Begins the next pass by itself."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0


def loader(kind, *, batched, workers=0):
    data = torch.arange(ROWS)
    if workers:
        return DataLoader(data, batch_size=4, sampler=kind(), num_workers=workers)
    if batched:
        return DataLoader(data, batch_sampler=kind(4))
    return DataLoader(data, batch_size=4, sampler=kind())


def train(make, folder, *, stop=None, resume=None, stateful=False):
    """Train three epochs of six batches, and save after each; return the batches."""
    torch.manual_seed(0)
    random.seed(0)
    data, seen, model = make(), [], torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = Bus(CheckpointHook(interval=1, by_epoch=False))
    sampler = getattr(data, "batch_sampler", None)
    kept = {"sampler": getattr(sampler, "sampler", sampler) if not hasattr(sampler, "state_dict") else sampler}
    with Run(bus, model=model, optimizer=optimizer, work_dir=folder, resume=resume, stateful=kept if stateful else None) as run:
        for epoch in run.epochs(3):
            if hasattr(getattr(data, "sampler", None), "set_epoch"):
                data.sampler.set_epoch(epoch)
            for batch in run.train(data):
                optimizer.step()
                seen.append(torch.as_tensor(batch).tolist())
                if len(seen) == stop:
                    run.stop()
    return seen


STOPS = [1, 3, 5, 6, 7, 12, 15]


@pytest.mark.long
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", [Order, Global, Told, Stateful, Anew])
def test_a_resumed_run_gets_the_batches_that_are_left(tmp_path, kind, batched, logs):
    if kind is Told and batched:
        return  # the run tells the hook DistSamplerSeedHook, or the user

    def make():
        return loader(kind, batched=batched)

    whole = train(make, tmp_path / "whole")
    assert len(whole) == 18
    for stop in STOPS:
        for stateful in (False, True) if issubclass(kind, Stateful) else (False,):
            folder = tmp_path / f"{stop}-{stateful}"
            train(make, folder, stop=stop, stateful=stateful)
            assert train(make, folder, resume="auto", stateful=stateful) == whole[stop:], (stop, stateful)
    assert not [entry for entry in logs if "sampler" in entry]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", [Counting, InPlace, Hidden])
def test_a_state_that_no_checkpoint_holds_is_told_once_before_it_matters(tmp_path, kind, batched, logs):
    train(lambda: loader(kind, batched=batched), tmp_path)
    assert [entry["sampler"] for entry in logs if "sampler" in entry] == [kind.__name__]


def test_the_state_of_a_sampler_that_workers_run_ahead_of_is_told(tmp_path, logs):
    train(lambda: loader(Stateful, batched=False, workers=1), tmp_path)
    assert [entry["sampler"] for entry in logs if "sampler" in entry] == ["Stateful"]


class Mine(Sequence):
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index >= 6:
            raise IndexError
        self.read.append(index)
        return index


@pytest.mark.parametrize(
    "make",
    [lambda read: range(6), lambda read: [*range(6)], lambda read: torch.arange(6), lambda read: np.arange(6), Mine],
    ids=["range", "list", "tensor", "array", "sequence"],
)
def test_a_sequence_is_skipped_by_index_without_a_warning(tmp_path, make):
    read: list[int] = []
    whole = train(lambda: make([]), tmp_path / "whole")
    train(lambda: make([]), tmp_path / "part", stop=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(lambda: make(read), tmp_path / "part", resume="auto") == whole[9:]
    assert read in ([], [*range(3, 6), *range(6)])
