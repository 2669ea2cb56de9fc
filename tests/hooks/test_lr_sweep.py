"""`LRSweepHook`: the curve of a sweep, its end, the suggestion, and what it puts back."""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError, TrainLoop
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, JSONLinesWriter, LoggerHook, LRSweepHook, ParamSchedulerHook
from trainbus.hooks.lr_sweep import steepest


class Job:
    """A least-squares problem, which diverges for rates above about 1."""

    def __init__(self, optimizer=torch.optim.SGD, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.5, **options)
        inputs = torch.randn(64, 8, 4)
        self.data = [(one, 5 + one.sum(1, keepdim=True)) for one in inputs]

    def step(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def run(self, hook, *hooks, **options):
        loop = TrainLoop(
            self.model,
            self.optimizer,
            step=self.step,
            train_data=self.data,
            bus=Bus(*hooks, hook),
            **{"max_epochs": 9, **options},
        )
        loop.run()
        return loop

    def state(self):
        return [{name: one.clone() for name, one in self.model.state_dict().items()}, str(self.optimizer.state_dict())]


def same(one, other):
    return one[1] == other[1] and all(torch.equal(value, other[0][name]) for name, value in one[0].items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_sweep_raises_the_rate_exponentially_and_puts_everything_back(kind):
    job = Job(kind)
    job.run(CheckpointHook(-1, save_last=False), max_epochs=1)  # the optimizer has a state
    job.optimizer.zero_grad()
    before, hook = job.state(), LRSweepHook(1e-4, 1e-2, 50)
    loop = job.run(hook)
    assert loop.counters.iter == len(hook.curve) == 50
    rates = [rate for rate, _ in hook.curve]
    assert rates[0] == 1e-4
    assert rates[-1] == pytest.approx(1e-2)
    assert all(after / before == pytest.approx(100 ** (1 / 49)) for before, after in pairwise(rates))
    assert same(job.state(), before)


def test_the_first_smoothed_loss_is_the_loss_and_a_constant_loss_stays():
    job, hook = Job(), LRSweepHook(1e-9, 1e-8, 20, beta=0.9)
    job.data = job.data[:1]
    job.run(hook, max_epochs=30)
    losses = [loss for _, loss in hook.curve]
    assert losses == pytest.approx([losses[0]] * 20, rel=1e-4)


def test_a_sweep_stops_at_divergence_and_suggests_a_rate_at_which_the_loss_falls(tmp_path):
    job, hook = Job(), LRSweepHook(1e-4, 1e4, 200)
    before = job.state()
    job.run(hook, LoggerHook(writers=[JSONLinesWriter()], interval=1), CheckpointHook(1), work_dir=tmp_path)
    assert 20 < len(hook.curve) < 200
    assert 1e-3 < hook.suggestion < 2
    facts = json.loads((tmp_path / "lr_sweep.json").read_text())
    assert facts["suggestion"] == hook.suggestion
    assert len(facts["lr"]) == len(facts["loss"]) == len(hook.curve)
    assert "sweep_loss" in (tmp_path / "scalars.jsonl").read_text()
    saved = load(next(tmp_path.glob("iter_*.safetensors")))["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in before[0].items())


def test_the_log_advises_no_resume_after_a_sweep(tmp_path, logs):
    Job().run(LRSweepHook(1e-3, 1e-2, 20), CheckpointHook(1, by_epoch=False), work_dir=tmp_path)
    assert "begin a new training" in logs[-1]["event"]
    assert "continue from" not in logs[-1]["event"]


def test_a_run_that_fails_in_a_sweep_gets_its_weights_back():
    job, hook = Job(), LRSweepHook(1e-3, 1, 20)
    before = job.state()
    job.data[7] = (torch.zeros(8, 3), torch.zeros(8, 1))
    with pytest.raises(RuntimeError):
        job.run(hook)
    assert same(job.state(), before)


def test_groups_keep_their_ratio():
    job, hook, seen = Job(), LRSweepHook(1e-4, 1e-3, 20), []
    job.optimizer.param_groups[0]["lr"] = 0.1
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.01})
    bus = Bus(hook)
    bus.on("after_train_iter", lambda event: seen.append([group["lr"] for group in job.optimizer.param_groups]))
    TrainLoop(job.model, job.optimizer, step=job.step, train_data=job.data, bus=bus, max_epochs=1).run()
    assert all(small == pytest.approx(large / 10) for large, small in seen[:20])
    assert seen[0][0] == 1e-4


def test_a_sweep_works_in_a_loop_of_your_own():
    job, hook = Job(), LRSweepHook(1e-4, 1e-1, 20)
    before = job.state()
    with Run(Bus(hook), model=job.model, optimizer=job.optimizer) as run:
        for _ in run.epochs(3):
            for batch in run.train(job.data):
                job.optimizer.zero_grad()
                loss = job.step(job.model, batch)
                loss.backward()
                job.optimizer.step()
                run.report(loss=loss)
    assert len(hook.curve) == 20
    assert same(job.state(), before)


def test_the_steepest_point_of_a_curve():
    rates = [10 ** (number / 10 - 5) for number in range(40)]
    curve = [(rate, 1 - 1 / (1 + math.exp(-3 * (math.log10(rate) + 3)))) for rate in rates]
    assert steepest(curve) == pytest.approx(1e-3, rel=0.3)
    assert steepest([(rate, 1.0) for rate in rates]) is None
    assert steepest([(rate, rate) for rate in rates]) is None
    assert steepest(curve[:3]) is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"start": 1.0, "end": 0.1}, "start"),
        ({"start": 0}, "start"),
        ({"end": math.inf}, "end"),
        ({"iterations": 5}, "iterations"),
        ({"beta": 1.0}, "beta"),
        ({"diverges_at": 1.0}, "diverges_at"),
    ],
)
def test_bad_options_are_errors(options, named):
    with pytest.raises(ConfigurationError, match=named):
        LRSweepHook(**options)


def test_a_schedule_or_another_optimizer_is_an_error_before_the_first_iteration():
    job = Job()
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    with pytest.raises(ConfigurationError, match="schedule"):
        job.run(LRSweepHook(), ParamSchedulerHook(schedule, by="iter"))
    job = Job()
    with pytest.raises(ConfigurationError, match="nothing"):
        job.run(LRSweepHook(optimizer="nothing"))


def test_a_loop_without_a_loss_is_an_error():
    job = Job()
    with pytest.raises(TrainingError, match="loss"), Run(Bus(LRSweepHook()), model=job.model, optimizer=job.optimizer) as run:
        for _ in run.epochs(1):
            for _ in run.train(job.data):
                job.optimizer.step()
