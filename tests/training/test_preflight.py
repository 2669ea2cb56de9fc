"""The look at the first validation batches before a training: it finds mistakes at once and changes nothing."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from trainbus.eventloop import Bus, ConfigurationError, TrainingError
from trainbus.eventloop.training.preflight import first_batches
from trainbus.hooks import CheckpointHook, EarlyStoppingHook


class Drawing(Dataset):
    """Draws from every generator there is, and counts."""

    def __init__(self):
        self.own, self.numbers, self.reads, self.generator = random.Random(3), np.random.default_rng(3), 0, torch.Generator()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.reads += 1
        noise = self.own.random() + self.numbers.random() + random.random() + np.random.rand() + float(torch.rand(()))
        noise += float(torch.rand((), generator=self.generator)) + self.reads
        return torch.full((4,), noise + index), index % 3


class Counting(nn.Module):
    """Changes a buffer and replaces another in each forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, inputs):
        self.seen += 1
        self.last = inputs.detach().mean()
        return inputs


class Alternating(RandomSampler):
    """Another order in each pass, by a count of its own."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([*super().__iter__()][:: (-1) ** self.passes])


def trained(parts, sanity, resume=None, work_dir=None, workers=0, **options):
    model = nn.Sequential(Counting(), *parts.model(dropout=0.5))
    data, shuffled = Drawing(), torch.Generator().manual_seed(5)
    train = DataLoader(Subset(data, range(8)), batch_size=2, shuffle=True, generator=shuffled)
    sampler = Alternating(data, generator=shuffled)
    # By fork: torch cannot send a generator to another process.
    options_of_workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    val = DataLoader(data, batch_size=3, sampler=sampler, **options_of_workers)
    seen = []

    def val_step(model, batch):
        seen.append(batch[1])
        if not seen[2:]:  # undone, because the first two calls are in the look
            model[1].weight.data.mul_(1.5)
        return {"loss": parts.step(model, batch), "noise": torch.rand(())}

    seen += [] if sanity else [None, None]
    bus = Bus(CheckpointHook(1))
    random.seed(1)
    np.random.seed(1)
    loop = parts.loop(
        bus, model=model, train_data=train, val_data=val, val_step=val_step, sanity=sanity, seed=7, work_dir=work_dir, **options
    )
    metrics = loop.run(resume=resume)
    return parts.weights(model), metrics, [one.tolist() for one in seen[2:]], sampler.passes, model.training


@pytest.mark.parametrize(("workers", "again"), [(0, False), (1, False), (0, True)], ids=["", "a worker", "resumed"])
def test_a_training_is_the_same_with_and_without_the_look(parts, tmp_path, workers, again):
    def sessions(sanity):
        yield trained(parts, sanity, work_dir=tmp_path / str(sanity), workers=workers)
        if again:
            yield trained(parts, sanity, resume="auto", work_dir=tmp_path / str(sanity), max_epochs=3)

    parts.assert_same([*sessions(2)], [*sessions(0)])


class Score:
    batches = 0

    def update(self, loss):
        self.batches += 1

    def compute(self):
        return self.batches

    def reset(self):
        self.batches = 0


def test_the_look_publishes_nothing_and_feeds_no_metric_of_the_user(parts, bus, trace):
    score, steps = Score(), []

    @bus.on("before_train")
    def look(event):
        assert (score.batches, len(steps)) == (0, 2)
        assert trace.names == ["before_run", "before_train"]
        event.run.stop()

    parts.loop(bus, metrics={"score": score}, val_step=lambda *one: steps.append(one) or {"loss": 1.0}).run()
    assert len(steps) == 2


class Stream(IterableDataset):
    def __init__(self):
        self.source = iter(range(9))

    def __iter__(self):
        yield from self.source


@pytest.mark.parametrize(
    "loader",
    [iter([1, 2]), DataLoader(Stream()), DataLoader(Stream(), num_workers=1)],
    ids=["iterator", "stream", "stream in a worker"],
)
def test_what_cannot_be_read_twice_is_not_looked_at(loader):
    assert first_batches(loader, 2) is None
    if not isinstance(loader, DataLoader):
        assert list(loader) == [1, 2]
    elif not loader.num_workers:
        assert len(list(loader)) == 9


def test_the_first_batches_are_those_of_the_next_pass():
    numbers, listed = TensorDataset(torch.arange(10)), [[torch.arange(4)], [torch.ones(2)]]
    for loader in (DataLoader(numbers, batch_size=4), DataLoader(numbers, batch_size=None), listed):
        found = first_batches(loader, 2)
        assert [one[0].tolist() for one in found] == [one[0].tolist() for one in loader][:2]


@pytest.mark.parametrize(
    ("needy", "mount_point"),
    [
        (CheckpointHook(save_best="mine", rule="less"), "after_val_iter"),
        (CheckpointHook(save_best="mine", rule="less"), "after_val_epoch"),
        (EarlyStoppingHook("mine", rule="less"), "after_val_epoch"),
    ],
)
def test_a_name_that_a_handler_may_report_or_add_to_the_metrics_is_a_warning_only(parts, tmp_path, needy, mount_point, logs):
    bus = Bus(needy)
    if mount_point == "after_val_iter":
        bus.on(mount_point, lambda event: event.run.report(mine=1.0))
    else:
        bus.on(mount_point, lambda event: event.metrics.update(mine=1.0), priority=10)
    parts.loop(bus, work_dir=tmp_path).run()
    assert any("'mine'" in entry["event"] for entry in logs if entry["log_level"] == "warning")


def test_a_metric_that_a_few_batches_do_not_suffice_for_is_a_warning_only(parts, tmp_path, logs):
    class Area(Score):
        def compute(self):
            if self.batches < 3:
                raise ValueError("Only one class present in y_true")
            return 0.5

    def loop(best, folder):
        bus = Bus(CheckpointHook(save_best=best, rule="greater"))
        return parts.loop(bus, metrics={"area": Area()}, val_data=parts.batches(3), work_dir=folder)

    assert loop("area", tmp_path / "1").run()["area"] == 0.5
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["metric"] == "area"
    assert "Only one class" in warning["error"]
    with pytest.raises(ConfigurationError, match="'area'"):
        loop("arena", tmp_path / "2").run()


def test_what_a_metric_needs_and_errors_of_the_step_are_told_before_the_training(parts):
    accuracy = SimpleNamespace(update=lambda predictions: None, compute=lambda: 0.0, reset=lambda: None)
    for options, kind, value in (
        ({"metrics": {"accuracy": accuracy}}, TrainingError, "'predictions'"),
        ({"val_step": lambda model, batch: batch["labels"]}, TypeError, "indices"),
    ):
        loop = parts.loop(**options)
        with pytest.raises(kind, match=value) as caught:
            loop.run()
        assert loop.counters.iter == 0
        assert any("sanity=0" in note for note in caught.value.__notes__)


def test_a_model_that_is_not_built_yet_is_not_looked_at(parts, bus):
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    bus.on("before_train", lambda event: (built.append(not is_lazy(model[0].weight)), event.run.stop()))
    built = []
    parts.loop(bus, model=model, optimizer=optimizer).run()
    assert built == [False]
