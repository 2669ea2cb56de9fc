"""The bridge to Ignite, against the real library: its engines train, validate, stop, save and resume; a bus hears it all."""

import inspect
from contextlib import suppress
from functools import partial

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("ignite")

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, FastaiLRFinder

from trainbus import attach
from trainbus.eventloop import Bus, ConfigurationError, SubscribeError, TrainingError
from trainbus.eventloop.errors import CheckpointError
from trainbus.hooks import EMAHook, RuntimeInfoHook
from trainbus.testing.host_job import VAL, Counting, Killed, assert_same, heard, killing, loader, noted, samples

from ..failing import fails
from .conformance import ignite

HAS_MAX_ITERS = "max_iters" in inspect.signature(Engine.run).parameters


class Job(ignite.Job):
    """With the usual engine, and an evaluator that runs when a test says so."""

    def __init__(self, bus=None, *, folder=None, **options):
        super().__init__(folder, bus, deterministic=False, **options)

    def attach(self, bus):
        self.bridge = attach(bus, self.trainer, evaluator=self.evaluator, work_dir=self.folder)


def test_a_step_that_the_scaler_skips_is_none():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(engine, batch):
        optimizer.zero_grad()
        loss = model(batch).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss}

    bus, updated = Bus(), []
    bus.on("after_train_iter", lambda event: updated.append(event.run.updated))
    bus.on("before_optimizer_step", lambda event: updated.append(float(model.bias.grad)))
    trainer = Engine(step)
    bridge = attach(bus, trainer)
    assert bridge.to_save["scaler"] is scaler
    trainer.run([torch.ones(1, 2), torch.full((1, 2), float("inf")), torch.ones(1, 2)])
    assert updated == [1.0, True, False, 1.0, True]


def test_output_transform_names_what_a_step_returns():
    seen = noted(bus := Bus(), "after_train_iter", "outputs")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine, batch):
        optimizer.step()
        model(batch)
        return batch, 0.5

    for transform in (None, lambda output: output[1], lambda output: {"mine": output[1]}):
        trainer = Engine(step)
        with attach(bus, trainer, output_transform=transform):
            trainer.run([torch.ones(1)])
    assert list(seen[0]) == ["output"]
    assert seen[1:] == [{"loss": 0.5}, {"mine": 0.5}]


class Steps:
    def __init__(self):
        self.generator, self.critic = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
        self.inner, self.frozen, self.loss = self.critic[0], nn.Linear(1, 1), nn.MSELoss()
        self.one = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.two = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def step(self, engine, batch):
        self.generator(batch).backward()
        self.one.step()
        if engine.state.iteration % 2:
            self.two.step()

    __call__ = step


def step_with(model, optimizer, engine, batch):
    model(batch).backward()
    optimizer.step()


def test_several_models_and_optimizers_are_found_by_name_and_frozen_ones_are_not():
    for make in (lambda steps: steps, lambda steps: steps.step):
        stepped, steps = noted(bus := Bus(), "after_optimizer_step", "name"), Steps()
        trainer = Engine(make(steps))
        bridge = attach(bus, trainer)
        trainer.run([torch.ones(1)] * 2)
        assert bridge.run.models == {"generator": steps.generator, "critic": steps.critic}
        assert bridge.run.optimizers == {"one": steps.one, "two": steps.two}
        assert stepped == ["one", "two", "one"]


def test_the_model_is_found_in_a_partial_and_given_ones_win():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    trainer = Engine(partial(step_with, model, optimizer))
    for options, found in (({}, model), ({"model": other}, other)):
        with attach(Bus(), trainer, **options) as bridge:
            trainer.run([torch.ones(1)])
            assert bridge.run.models == {"model": found}


def test_wrong_options_and_a_second_bus_are_errors():
    job, plain, step = Job(Bus()), Job(), Engine(lambda engine, batch: None)
    stray = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for error, named, trainer, options in (
        (ConfigurationError, "optimizer=", step, {}),
        (ConfigurationError, "model=", step, {"optimizer": stray}),
        (ConfigurationError, "evaluators=.*ignite.*evaluator", plain.trainer, {"evaluators": job.evaluator}),
        (ConfigurationError, "evaluator=", plain.trainer, {"evaluator": nn.Linear(1, 1)}),
        (ConfigurationError, "evaluator=", plain.trainer, {"evaluator": plain.trainer}),
        (SubscribeError, "Engine", job.trainer, {}),
    ):
        with pytest.raises(error, match=named):
            attach(Bus(), trainer, **options)


def test_hooks_of_validations_are_not_warned_about_without_an_evaluator():
    with structlog.testing.capture_logs() as logs:
        attach(Bus(EMAHook(), RuntimeInfoHook()), Job().trainer)
    assert logs == []


def test_a_validation_is_the_run_of_the_evaluator_with_its_metrics():
    bus, seen = Bus(), []
    bus.on(
        "after_val_epoch", lambda e: seen.append((e.progress.epoch, e.progress.iter, e.metrics, e.run.data.evaluation_length))
    )
    bus.on("before_val", lambda event: seen.append(event.run.training))
    job = Job(bus)
    metrics = []
    job.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=3) | Events.COMPLETED,
        lambda: metrics.append(dict(job.evaluator.run(loader(2)).metrics)),
    )
    job.trainer.run(loader(4), max_epochs=1)
    assert seen == [True, (0, 3, metrics[0], 2), True, (1, 4, metrics[1], 2)]
    assert set(metrics[0]) == {"loss"}


def test_a_validation_before_the_training_is_part_of_it():
    names = heard(bus := Bus())
    job = Job(bus)
    job.trainer.add_event_handler(Events.STARTED, lambda: job.evaluator.run(loader(1)))
    job.trainer.run(loader(1))
    assert names[:9] == ["before_run", "before_train", *VAL, "before_train_epoch"]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_validation_that_is_cut_short_or_whose_error_is_caught_has_no_end_and_is_undone(error):
    names = heard(bus := Bus(ema := EMAHook()))
    job = Job(bus)
    job.evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=1), fails(error) if error else job.evaluator.terminate)

    @job.trainer.on(Events.EPOCH_COMPLETED)
    def validate():
        with suppress(ZeroDivisionError):
            job.evaluator.run(loader(2))

    job.trainer.run(loader(1), max_epochs=2)
    assert names.count("after_train_epoch") == 2
    assert error or names[-4:] == ["before_val_iter", "after_val_iter", "after_train", "after_run"]
    assert not {"on_exception", "after_val_epoch", "after_val"} & set(names)
    assert not ema.average.swapped


def test_ignites_own_early_stopping_and_terminations_are_followed():
    names = heard(bus := Bus())
    job = Job(bus, validate=True)
    stopping = EarlyStopping(patience=1, score_function=lambda engine: 0.0, trainer=job.trainer)
    job.evaluator.add_event_handler(Events.COMPLETED, stopping)
    assert job.trainer.run(loader(2), max_epochs=9).epoch == 2
    assert names.count("after_train_epoch") == names.count("after_val_epoch") == 2


def test_an_epoch_that_the_engine_ends_early_ends_if_ignite_says_so():
    for skip, ended in ((False, 2), (True, 1)):
        names = heard(bus := Bus())
        epochs = noted(bus, "before_train_iter", "progress.epoch", "batch_idx", "progress.iter")
        job = Job(bus)
        job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), partial(job.trainer.terminate_epoch, skip))
        job.trainer.run(loader(3), max_epochs=2)
        assert epochs[:4] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        assert names.count("after_train_epoch") == ended
        assert names.count("before_train_epoch") == 2


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging")
def test_a_learning_rate_finder_may_make_the_run_longer():
    seen = noted(bus := Bus(), "before_train_epoch", "progress.max_epochs", "run.data.total_iters")
    job, finder = Job(bus), FastaiLRFinder()
    with finder.attach(job.trainer, {"model": job.model, "optimizer": job.optimizer}, num_iter=5, diverge_th=1e9) as trainer:
        trainer.run(loader(4))
    steps, limits = (5, (None, 5)) if HAS_MAX_ITERS else (6, (2, 8))  # Ignite before 0.5.5 adds whole epochs, and a step
    assert len(finder.get_results()["lr"]) == job.bridge.run.counters.iter == steps
    assert seen == [limits] * 2


def test_a_limit_and_data_that_handlers_change_are_those_of_the_next_epoch():
    seen = noted(bus := Bus(), "before_train_epoch", "progress.max_epochs", "run.data.train")
    job, first, other = Job(bus), loader(4), loader(4)

    @job.trainer.on(Events.EPOCH_COMPLETED(once=1))
    def change(engine):
        engine.state.max_epochs = 3
        engine.set_data(other)

    job.trainer.run(first, max_epochs=2)
    assert [(limit, data is other) for limit, data in seen] == [(2, False), (3, True), (3, True)]


@pytest.mark.skipif(not HAS_MAX_ITERS, reason="Ignite has max_iters since 0.5.5")
def test_max_iters_is_a_limit_in_iterations_and_a_later_run_has_both_limits():
    class Unsized:
        def __iter__(self):
            return iter(loader(4))

    job = Job(Bus())
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), job.trainer.terminate)
    job.trainer.run(Unsized(), max_iters=10)
    assert job.trainer.state.max_epochs == 3  # Ignite sets it when the data has ended once
    job.trainer.run(Unsized())
    assert job.bridge.run.counters.iter == job.trainer.state.iteration == 10
    names = heard(bus := Bus())
    job = Job(bus)
    job.trainer.run(loader(2), max_iters=3)  # it ends within an epoch
    counters = job.bridge.run.counters
    assert (counters.iter, counters.max_iters, counters.max_epochs) == (3, 3, None)
    assert names.count("after_train_epoch") == 1
    assert names[-2:] == ["after_train", "after_run"]


def test_epoch_length_and_iterators_of_unknown_length():
    lengths = "progress.epoch", "batch_idx", "run.data.epoch_length"
    seen = noted(bus := Bus(), "before_train_iter", *lengths)
    Job(bus).trainer.run(loader(2), max_epochs=2, epoch_length=3)
    assert seen == [(epoch, index, 3) for epoch in range(2) for index in range(3)]
    seen, data = noted(bus := Bus(), "before_train_iter", *lengths), list(loader(2))
    trainer = Job(bus).trainer
    trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: trainer.set_data(iter(data)))
    trainer.run(iter(data), max_epochs=1)
    assert seen == [(0, 0, None), (0, 1, None)]


@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED])
def test_an_exception_in_a_handler_of_ignite_is_told_and_raised(event):
    names = heard(bus := Bus())
    job = Job(bus)
    job.trainer.add_event_handler(event, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.trainer.run(loader(2))
    assert names[-1:] == ([] if event == Events.STARTED else ["on_exception"])
    assert "after_train" not in names
    assert bus.state == "idle"


def test_an_exception_that_a_handler_of_ignite_swallows_ends_the_run_as_failed():
    names = heard(bus := Bus())
    job = Job(bus)
    swallowed = []
    job.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: swallowed.append(error))
    bus.on("after_train_iter", fails(KeyboardInterrupt), once=2)
    job.trainer.run(loader(4))
    assert isinstance(swallowed[0], KeyboardInterrupt)
    assert names[-1] == "on_exception"
    assert bus.state == "idle"


def test_training_goes_on_if_ignite_does_after_an_exception():
    names = heard(bus := Bus())
    job = Job(bus)
    job.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    bus.on("before_optimizer_step", fails(ValueError), once=2)
    state = job.trainer.run(loader(2), max_epochs=2)
    assert state.epoch == 2
    assert names[-2:] == ["after_train", "after_run"]
    assert job.bridge.run.counters.iter == state.iteration


# Ignite resumes exactly between epochs with such a loader, and in an epoch only with data in a fixed order.
def test_a_resumed_training_with_a_loader_that_shuffles_goes_on_exactly(tmp_path):
    def make(**options):
        bus = Bus(hook := Counting(), ema := EMAHook(momentum=0.1), RuntimeInfoHook())
        job = ignite.Job(tmp_path, bus, epochs=5, **options)
        job.data = DataLoader(samples(4), batch_size=2, shuffle=True)
        return job, hook, ema

    whole, hook, ema = make()
    whole.fit()
    cut, *_ = make(every=8, look=killing(9))
    with pytest.raises(Killed):
        cut.fit()
    rest, counted, average = make()
    names, indices = heard(rest.bus), noted(rest.bus, "before_train_iter", "progress.epoch", "batch_idx")
    rest.fit(cut.own())
    assert_same(rest.weights(), whole.weights())
    assert_same(average.average.tensors, ema.average.tensors)
    assert counted.iters == hook.iters == [(i // 4, i, i % 4) for i in range(20)]
    assert rest.bridge.run.counters.saved() == whole.bridge.run.counters.saved()
    assert indices == [divmod(index, 4) for index in range(8, 20)]
    assert names[:3] == ["before_run", "after_load_checkpoint", "before_train"]


def test_the_best_checkpoint_of_ignite_has_the_averaged_weights(tmp_path):
    told = noted(bus := Bus(ema := EMAHook(momentum=0.1)), "checkpoint_committed", "path")
    job = Job(bus, validate=True)
    score = Checkpoint.get_default_score_fn("loss", -1.0)
    best = Checkpoint({"model": job.model, "bus": job.bridge}, DiskSaver(tmp_path), score_function=score, n_saved=1)
    job.evaluator.add_event_handler(Events.COMPLETED, best)
    job.trainer.run(loader(), max_epochs=1)
    saved = torch.load(tmp_path / best.last_checkpoint, weights_only=True)
    for name, tensor in ema.average.tensors.items():
        assert torch.equal(saved["model"][name], tensor)
    assert told == [str(tmp_path / best.last_checkpoint)]


def test_a_requested_save_has_what_handlers_of_ignite_did_in_the_iteration(tmp_path):
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.checkpoints.save(), once=2)
    job = Job(bus, folder=tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    job.bridge.to_save["schedule"] = schedule
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    job.trainer.run(loader())
    saved = torch.load(tmp_path / "iter_2.pt", weights_only=True)
    assert saved["schedule"]["last_epoch"] == 2
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.1 / 4


def test_the_state_of_the_bus_is_refused_where_it_makes_no_sense():
    job = Job(Bus())
    with pytest.raises(TrainingError, match=r"trainer\.run\(\)"):
        job.bridge.state_dict()
    with pytest.raises(CheckpointError, match="bus"):
        job.bridge.load_state_dict({"epoch": 1})
    job.trainer.add_event_handler(Events.EPOCH_STARTED, lambda: job.bridge.load_state_dict(job.bridge.state_dict()))
    with pytest.raises(TrainingError):
        job.trainer.run(loader())


def test_a_forgotten_trainer_is_a_warning():
    job = Job(Bus())
    job.trainer.run(loader())
    other = Job(Bus())
    other.bridge.load_state_dict(job.bridge.state_dict())
    with structlog.testing.capture_logs() as logs:
        other.trainer.run(loader())
    assert any("load the trainer" in one["event"] for one in logs)
    assert other.bridge.run.counters.iter == 4


def test_a_second_run_of_the_engine_continues_where_ignite_does():
    seen = noted(bus := Bus(), "before_train_iter", "progress.epoch", "batch_idx", "progress.iter", "progress.update")
    job = Job(bus)
    job.trainer.run(loader(2), max_epochs=1)
    with structlog.testing.capture_logs() as logs:
        job.trainer.run(loader(2), max_epochs=2)
    assert seen[2:] == [(1, 0, 2, 2), (1, 1, 3, 3)]
    assert logs == []
    seen.clear()
    job.trainer.run(loader(2), max_epochs=2)  # a new training
    assert seen[0] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("event", "times", "ends", "places"),
    [
        (Events.EPOCH_STARTED, 2, "interrupt", [0, 1, 2, 3, 4, 5]),
        (Events.ITERATION_STARTED, 2, "interrupt", [0, 1, 2, 3, 4, 5]),
        (Events.ITERATION_COMPLETED, 2, "interrupt", [0, 1, 2, 3, 4, 5]),
        (Events.ITERATION_COMPLETED, 1, "terminate", [0, 2, 3, 4, 5]),  # with the next epoch
    ],
)
def test_an_engine_that_was_ended_early_continues_where_ignite_does(event, times, ends, places):
    seen = noted(bus := Bus(), "before_train_iter", "progress.epoch", "batch_idx", "progress.iter")
    job = Job(bus)
    job.trainer.add_event_handler(event(once=times), getattr(job.trainer, ends))
    job.trainer.run(loader(2), max_epochs=3)
    assert bus.state == "idle"
    assert len(seen) < 6
    job.trainer.run(loader(2), max_epochs=3)
    assert seen == [(*divmod(place, 2), index) for index, place in enumerate(places)]
