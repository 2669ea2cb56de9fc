"""``run.iterations()``: a training without a loader, in one flat loop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.hooks import CheckpointHook

pytestmark = pytest.mark.filterwarnings("ignore:this resumed run has entered")


class Job:
    """Random steps of a model, an update in every second one."""

    def __init__(self, bus: Bus, folder: Any = None, resume: Any = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.seen: list[int] = []
        self.run = Run(bus, model=self.model, optimizer=self.optimizer, work_dir=folder, resume=resume)

    def step(self, index: int) -> None:
        self.seen.append(index)
        loss = self.model(torch.rand(3, 2)).pow(2).mean()
        if index % 2:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.run.report(loss=loss)

    def train(self, number: int) -> list[int]:
        with self.run as run:
            for index in run.iterations(number):
                self.step(index)
        return self.seen

    @property
    def weights(self) -> list[float]:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).tolist()


def test_the_body_is_an_iteration_of_one_epoch_as_long_as_the_training(trace, bus):
    job = Job(bus)
    assert job.train(3) == [0, 1, 2]
    events = "before_train_iter after_train_iter"
    assert [name for name in trace.names if "optimizer" not in name] == (
        f"before_run before_train before_train_epoch {events} {events} {events} after_train_epoch after_train after_run".split()
    )
    counters = job.run.counters
    assert (counters.epoch, counters.iter, counters.update, counters.max_iters) == (1, 3, 1, 3)


@pytest.mark.parametrize("at", range(1, 7))
def test_a_run_that_was_stopped_or_killed_goes_on_with_the_same_index(tmp_path, at):
    whole = Job(Bus())
    whole.train(7)
    bus = Bus(CheckpointHook(1, by_epoch=False))
    bus.on("after_train_iter", lambda event: event.run.stop() if event.progress.iter == at - 1 else None)
    first = Job(bus, tmp_path)
    first.train(7)
    second = Job(Bus(), tmp_path, resume="auto")
    second.train(7)
    assert first.seen + second.seen == whole.seen
    assert second.weights == whole.weights


def test_a_finished_training_goes_on_with_a_larger_number_and_says_if_nothing_is_left(tmp_path, logs):
    whole = Job(Bus())
    whole.train(7)
    first = Job(Bus(CheckpointHook(1000, by_epoch=False)), tmp_path)
    first.train(4)
    second = Job(Bus(CheckpointHook(1000, by_epoch=False)), tmp_path, resume="auto")
    assert second.train(7) == [4, 5, 6]
    assert second.weights == whole.weights
    third = Job(Bus(), tmp_path, resume="auto")
    assert third.train(7) == []
    assert [one["id"] for one in logs if one["log_level"] == "warning"].count("nothing-left-to-train") == 1


def test_break_ends_the_training_and_a_run_that_resumes_says_so(tmp_path, logs):
    job = Job(Bus(CheckpointHook(1000, by_epoch=False)), tmp_path)
    names: list[str] = []
    job.run.bus.on("after_train", lambda event: names.append(event.mount_point))
    with job.run as run:
        for index in run.iterations(100):
            job.step(index)
            if index == 3:
                break
    assert (job.run.counters.iter, names) == (4, ["after_train"])
    again = Job(Bus(), tmp_path, resume="auto")
    with again.run as run:
        again.seen.extend(itertools.islice(run.iterations(100), 2))
    assert again.seen == [4, 5]
    assert "saved-run-left-by-break" in [one.get("id") for one in logs]


def test_a_validation_may_come_in_the_body(trace, bus):
    job = Job(bus)
    with job.run as run:
        for index in run.iterations(4):
            job.step(index)
            if index % 2:
                for _ in run.validate(range(1)):
                    run.report(score=index)
    assert trace.names.count("after_val") == 2
    assert job.run.counters.iter == 4


@pytest.mark.parametrize("number", [0, -1, 1.5, "7"])
def test_the_number_is_checked(number):
    job = Job(Bus())
    with job.run as run, pytest.raises(ConfigurationError, match=r"max_iters="):
        run.iterations(number)
