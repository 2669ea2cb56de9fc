"""`limit_train_batches`, `limit_val_batches` and `overfit_batches`: shorter epochs, and a resume that stays bitwise."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.hooks import CheckpointHook


def dataset(count=32):
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(9)), torch.arange(count) % 3)


def shuffled(workers=0, **sampling):
    options = sampling or {"shuffle": True}
    generator = torch.Generator().manual_seed(5)
    data = dataset()
    if options.pop("replacement", False):
        options = {"sampler": RandomSampler(data, replacement=True, generator=generator)}
    return DataLoader(data, 4, generator=generator, num_workers=workers, persistent_workers=workers > 0, **options)


class Stateful:
    """A loader with a position of its own, as torchdata's: it orders its batches by the number of passes that it has begun."""

    def __init__(self):
        self.passes = self.at = self.begin = 0

    def __len__(self):
        return 8

    def __iter__(self):
        begin, self.at, self.begin = self.begin, 0, 0
        order, data = torch.randperm(8, generator=torch.Generator().manual_seed(self.passes)), dataset()
        self.passes += 1
        for index in range(begin, 8):
            self.at = index + 1
            yield data[order[index] * 4 : order[index] * 4 + 4]
        self.at = 0

    def state_dict(self):
        return {"passes": self.passes - (self.at > 0), "at": self.at}

    def load_state_dict(self, state):
        self.passes, self.begin = state["passes"], state["at"]


class Unsized(Stateful):
    """The same without a length, so the loop reads one batch ahead."""

    __len__ = None


def torchdatas(**options):
    made = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    torch.manual_seed(5)  # its sampler draws a seed
    return made(**({"dataset": dataset(), "batch_size": 4, "shuffle": True} | options))


class Stream(IterableDataset):
    def __iter__(self):
        data = dataset()
        yield from (data[index] for index in range(len(data)))


def trained(parts, folder, loader, stop_at=None, resume=None, **options):
    """Train; return the inputs of each step, the weights, and the batches of each validation."""
    seen, validated = [], []

    def step(model, batch):
        seen.append(batch[0])
        return parts.step(model, batch)

    def val_step(model, batch):
        validated.append(batch[0])
        return {"loss": parts.step(model, batch)}

    bus = Bus(CheckpointHook(1, by_epoch=False))
    if stop_at is not None:
        parts.act_at(bus, "after_train_iter", stop_at, lambda event: event.run.stop("test"))
    model = parts.model(dropout=0.5)
    loop = parts.loop(
        bus, model=model, step=step, val_step=val_step, train_data=loader, work_dir=folder, sanity=0, seed=7, **options
    )
    loop.run(resume=resume)
    return seen, parts.weights(model), validated


LENGTHS = {"epochs": {"max_epochs": 3}, "iterations": {"max_iters": 9, "val_interval": 4}}
LOADERS = {
    "shuffled": shuffled,
    "replacement": lambda: shuffled(replacement=True),
    "workers": lambda: shuffled(workers=2),
    "stateful": Stateful,
    "stateful without a length": Unsized,
    "stream": lambda: DataLoader(Stream(), 4),
}


@pytest.mark.long
@pytest.mark.parametrize("loader", [Stateful, Unsized])
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_a_limited_epoch_of_a_loader_with_a_state_is_resumed_without_reading_it_again(parts, tmp_path, limit, loader):
    """The next epoch begins a new pass over the loader, as in a run that was not stopped."""
    options = {"limit_train_batches": limit, "max_epochs": 3}
    whole = trained(parts, tmp_path / "whole", loader(), **options)
    for stop_at in sorted({1, limit - 1, limit, limit + 1, 2 * limit} - {0}):
        first = trained(parts, tmp_path / str(stop_at), loader(), stop_at, **options)
        rest = trained(parts, tmp_path / str(stop_at), loader(), resume="auto", **options)
        parts.assert_same([first[0] + rest[0], rest[1]], list(whole[:2]))


def test_an_epoch_left_by_break_is_followed_by_a_new_pass_in_a_resumed_run(parts, tmp_path):
    def train(loader, epochs, resume=None):
        seen, run = [], Run(Bus(CheckpointHook(1)), model=parts.model(), work_dir=tmp_path, resume=resume)
        with run:
            for _ in run.epochs(epochs):
                for index, batch in enumerate(run.train(loader)):
                    seen.append(batch[0])
                    if index == 4:
                        break
        return seen

    whole = train(Stateful(), 3)
    parts.assert_same(whole, train(Stateful(), 1) + train(Stateful(), 3, resume=tmp_path / "epoch_1.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize(
    "option", [{"limit_train_batches": 3, "limit_val_batches": 1}, {"overfit_batches": 3}], ids=["", "over"]
)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.filterwarnings("ignore:resuming reads and drops:RuntimeWarning")
def test_a_limited_run_that_was_interrupted_anywhere_is_the_same(parts, tmp_path, kind, length, option):
    whole = trained(parts, tmp_path / "whole", LOADERS[kind](), **length, **option)
    assert len(whole[0]) == 9
    for stop_at in (1, 3, 5) if "workers" in kind else range(1, 9):
        folder = tmp_path / str(stop_at)
        first = trained(parts, folder, LOADERS[kind](), stop_at, **length, **option)
        rest = trained(parts, folder, LOADERS[kind](), resume="auto", **length, **option)
        parts.assert_same([first[0] + rest[0], rest[1], first[2] + rest[2]], list(whole))


TORCHDATA = {
    "shuffled": torchdatas,
    "own generator": lambda: torchdatas(generator=torch.Generator()),
    "stream": lambda: torchdatas(dataset=Stream(), shuffle=False),
    "workers": lambda: torchdatas(num_workers=2),
    "persistent workers": lambda: torchdatas(num_workers=2, persistent_workers=True),
}


@pytest.mark.long
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("kind", TORCHDATA)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
def test_a_run_over_a_loader_of_torchdata_that_was_interrupted_is_the_same(parts, tmp_path, kind, length, limit):
    options = {"limit_train_batches": limit, **length}
    whole = trained(parts, tmp_path / "whole", TORCHDATA[kind](), **options)
    for stop_at in (2, 3, 5) if "workers" in kind else range(1, 9):
        folder = tmp_path / str(stop_at)
        first = trained(parts, folder, TORCHDATA[kind](), stop_at, **options)
        rest = trained(parts, folder, TORCHDATA[kind](), resume="auto", **options)
        parts.assert_same([first[0] + rest[0], rest[1]], list(whole[:2]))


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
def test_validations_of_a_part_of_a_loader_of_torchdata_go_on_with_other_batches(parts, tmp_path, kind):
    def part(name, *stop_at, **options):
        val_data = TORCHDATA[kind]()
        limits = {"limit_val_batches": 2, "limit_train_batches": 3, "max_epochs": 4}
        return trained(parts, tmp_path / name, shuffled(), *stop_at, val_data=val_data, **limits, **options)[2]

    whole = part("whole")
    assert len(whole) == 8
    for stop_at in (4, 6):
        parts.assert_same(part(str(stop_at), stop_at) + part(str(stop_at), resume="auto"), whole)


def test_a_limited_epoch_takes_other_batches_each_time_and_an_overfit_one_the_same_in_order(parts, tmp_path):
    limited, _, _ = trained(parts, tmp_path / "a", shuffled(), limit_train_batches=0.25)
    overfit, _, validated = trained(parts, tmp_path / "b", shuffled(), overfit_batches=2, val_data=shuffled())
    inputs = dataset().tensors[0]
    assert len(limited) == len(overfit) == 4
    assert not torch.equal(torch.cat(limited[:2]), torch.cat(limited[2:]))
    parts.assert_same(overfit, [inputs[:4], inputs[4:8]] * 2)
    parts.assert_same(validated, overfit)


@pytest.mark.parametrize(
    ("sampler", "first"),
    [
        (lambda data: SubsetRandomSampler([7, 3, 5, 1]), [7, 3, 5, 1]),
        (lambda data: WeightedRandomSampler([1.0] * 32, 32), [0, 1, 2, 3]),
        (lambda data: DistributedSampler(data, 2, 1), [1, 3, 5, 7]),
        (lambda data: DistributedSampler(data, 2, 1, shuffle=False), [1, 3, 5, 7]),
    ],
)
def test_overfit_batches_keeps_the_samples_of_a_sampler(parts, tmp_path, sampler, first):
    data = dataset()
    seen, _, _ = trained(parts, tmp_path, DataLoader(data, 4, sampler=sampler(data)), overfit_batches=1)
    parts.assert_same(seen, [data.tensors[0][first]] * 2)


def test_schedules_and_progress_bars_see_the_limited_number(parts, bus):
    lengths = []
    bus.on("before_train", lambda event: lengths.append((event.run.data.epoch_length, event.run.data.total_iters)))
    bus.on("before_train_iter", lambda event: lengths.append((event.run.data.epoch_length, event.run.data.last_batch)))
    bus.on("after_val_iter", lambda event: lengths.append(event.run.data.evaluation_length))
    parts.loop(bus, train_data=parts.batches(10), limit_train_batches=2, limit_val_batches=0.5, max_epochs=1).run()
    assert lengths == [(2, 2), (2, False), (2, True), 1]


def test_limit_val_batches_0_validates_never(parts, bus, trace):
    parts.loop(bus, limit_val_batches=0).run()
    assert "before_val" not in trace.names


class Own(Sampler):
    def __iter__(self):
        yield from (3, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"limit_train_batches": 0}, "limit_train_batches"),
        ({"limit_train_batches": 1.5}, "1.5"),
        ({"limit_val_batches": -1}, "limit_val_batches"),
        ({"limit_train_batches": True}, "limit_train_batches"),
        ({"limit_train_batches": 0.1}, "0.1"),
        ({"limit_train_batches": 0.5, "train_data": DataLoader(Stream(), 4)}, "train_data"),
        ({"overfit_batches": 1, "limit_val_batches": 1}, "limit_val_batches"),
        ({"overfit_batches": 1, "train_data": DataLoader(dataset(), 4, sampler=Own())}, "Own"),
        ({"overfit_batches": 1, "train_data": DataLoader(dataset(), batch_sampler=BatchSampler(Own(), 2, False))}, "Own"),
        ({"limit_train_batches": 1, "global_batch": 8, "train_data": shuffled()}, "global_batch"),
    ],
)
def test_a_bad_limit_is_an_error_of_the_construction(parts, options, named):
    with pytest.raises(ConfigurationError, match=named):
        parts.loop(**options)
