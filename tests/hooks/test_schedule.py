"""When schedulers step, and their place in checkpoints."""

import pytest
import torch
from torch.optim import lr_scheduler

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, OptimizerHook, ParamSchedulerHook

from ..training.test_wrappers import Manager, OptimizerWrapper


def rates_of(loop):
    """The learning rates that forward passes are made with."""
    seen: list[float] = []
    loop.bus.on("before_forward", lambda event: seen.append(event.run.optimizers["optimizer"].param_groups[0]["lr"]))
    return seen


OTHER = torch.optim.Adam(torch.nn.Linear(1, 1).parameters(), lr=1.0)


def halving(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def scheduled(job, by, *more, make=halving, monitor=None, **options):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hook = ParamSchedulerHook(make(optimizer), by=by, monitor=monitor)
    loop = job.loop(hook, *more, model=model, optimizer=optimizer, **options)
    return loop, rates_of(loop)


@pytest.mark.parametrize(
    ("by", "accumulate", "rates"),
    [
        ("iter", 1, [1, 0.5, 0.25, 0.125]),  # after each update
        ("iter", 2, [1, 1, 0.5, 0.5]),  # a window of two is one step
        ("epoch", 1, [1] * 4 + [0.5] * 4),
    ],
)
def test_schedules_step_after_updates_or_epochs(job, by, accumulate, rates):
    loop, seen = scheduled(job, by, OptimizerHook(accumulate=accumulate), max_epochs=2 if by == "epoch" else 1)
    loop.run()
    assert seen == rates


def test_by_metric_steps_with_it_after_validations_of_training_only(job):
    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    metrics = {"error": job.Scores(1.0, 2.0, 3.0, 4.0)}
    validation = {"val_data": job.batches(1), "metrics": metrics}
    loop, rates = scheduled(job, "metric", make=plateau, monitor="error", max_epochs=3, **validation)
    loop.run()
    assert rates == [1] * 8 + [0.5] * 4
    loop.validate()
    (optimizer,) = (hook.schedulers["ReduceLROnPlateau"].optimizer for hook in loop.bus.hooks[:1])
    assert optimizer.param_groups[0]["lr"] == 0.25  # of the third validation, none of the last


class Follower:
    """A schedule of another package, which follows a metric and takes an epoch as torch's do."""

    def __init__(self):
        self.seen = []

    def step(self, metrics, epoch=None):
        self.seen.append(metrics)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class ByEpoch(Follower):
    """A schedule that is told the epoch."""

    def step(self, epoch, metric=None):
        raise NotImplementedError


def test_a_schedule_that_is_not_torchs_follows_a_metric(job):
    follower = Follower()
    validation = {"val_data": job.batches(1), "metrics": {"error": job.Scores(1.0, 2.0)}}
    loop, _ = scheduled(job, "metric", make=lambda _: follower, monitor="error", max_epochs=2, **validation)
    loop.run()
    assert follower.seen == [1.0, 2.0]


@pytest.mark.parametrize(("kind", "by"), [(Follower, "iter"), (Follower, "epoch"), (ByEpoch, "epoch"), (ByEpoch, "metric")])
def test_a_schedule_that_cannot_be_stepped_so_is_refused(kind, by):
    with pytest.raises(ConfigurationError, match=kind.__name__):
        ParamSchedulerHook(kind(), by=by, monitor="loss" if by == "metric" else None)


def test_with_several_optimizers_a_scheduler_follows_its_own(job):
    model = job.model()
    first = torch.optim.SGD(model[0].parameters(), lr=1.0)
    second = torch.optim.SGD(model[2].parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")

    def step(model, batch):  # a loss that does not reach the second
        return model[0](batch[0]).square().mean()

    schedules = ParamSchedulerHook({"first": halving(first), "second": halving(second)}, by="iter")
    optimizers = {"first": first, "second": second}
    hooks = (OptimizerHook(scaler=scaler), schedules)
    job.loop(*hooks, model=model, optimizer=optimizers, step=step, max_iters=2).run()
    assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (0.25, 1.0)


@pytest.mark.parametrize("by", ["iter", "epoch", "metric"])
@pytest.mark.parametrize("stop", [2, 4, 7])
def test_a_resumed_schedule_ends_with_the_same_bits(job, tmp_path, by, stop):
    def make(optimizer):
        if by == "metric":
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def run(directory, *more, resume=None):
        monitor = "loss" if by == "metric" else None
        options = {"work_dir": directory, "max_epochs": 3, "val_data": job.batches(1)}
        loop, _ = scheduled(job, by, CheckpointHook(interval=1), *more, make=make, monitor=monitor, **options)
        loop.run(resume=resume)
        return job.weights(loop.model)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", job.StopAfter(stop))
    assert job.same(run(tmp_path / "parts", resume="auto"), whole)
    assert "param_schedulers" in load(tmp_path / "whole" / "epoch_3.safetensors")


def test_a_checkpoint_without_schedules_warns(job, tmp_path, logs):
    job.loop(CheckpointHook(), work_dir=tmp_path, max_epochs=1).run()
    loop, _ = scheduled(job, "iter", work_dir=tmp_path)
    loop.model.load_state_dict(job.model().state_dict())
    loop.run(resume="auto")
    assert any(entry.get("id") == "no-state-for-scheduler" for entry in logs)


def one_in_two_hooks(optimizer):
    scheduler = halving(optimizer)
    return ParamSchedulerHook({"a": scheduler}, by="epoch"), ParamSchedulerHook({"b": scheduler}, by="iter")


@pytest.mark.parametrize(
    ("hooks_of", "named"),
    [
        (lambda optimizer: [ParamSchedulerHook(halving(optimizer), by=by) for by in ("iter", "epoch")], "'ExponentialLR'"),
        (lambda optimizer: [ParamSchedulerHook(halving(OTHER), by="epoch")], r"'ExponentialLR'.*Adam.*'optimizer'"),
        (one_in_two_hooks, "'b'"),
    ],
)
def test_schedulers_that_cannot_be_are_errors_when_training_begins(job, tmp_path, hooks_of, named, logs):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop = job.loop(*hooks_of(optimizer), CheckpointHook(), model=model, optimizer=optimizer, work_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        loop.run()
    assert loop.counters.iter == 0


def test_a_scheduler_of_a_wrapped_optimizer_steps_with_the_wrapper(job, logs):
    model = job.model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    hooks = (OptimizerHook(accumulate=2), ParamSchedulerHook(halving(inner), by="iter"))
    loop = job.loop(*hooks, model=model, optimizer=OptimizerWrapper(Manager(), inner), max_epochs=1)
    rates = rates_of(loop)
    loop.run()
    assert rates == [1, 1, 0.5, 0.5]


def test_a_run_without_known_optimizers_steps_any_scheduler(job):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Run(Bus(ParamSchedulerHook(halving(optimizer), by="iter")), model=model) as run:
        for _ in run.epochs(1):
            for batch in run.train(job.batches(2)):
                job.loss(model, batch).backward()
                optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_same_hook_continues_in_a_second_training(job):
    loop, rates = scheduled(job, "epoch", max_epochs=1)
    loop.run()
    loop.max_epochs = 2
    loop.run()
    assert rates == [1] * 4 + [0.5] * 4
