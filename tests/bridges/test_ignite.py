"""The bridge to Ignite, against the real library: its engines train, validate, stop, save and resume; a bus hears it all."""

import inspect
import logging
import signal
from contextlib import suppress
from functools import partial

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("ignite")

from ignite.engine import (
    DeterministicEngine,
    Engine,
    Events,
    create_supervised_evaluator,
    create_supervised_trainer,
)
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, FastaiLRFinder
from ignite.metrics import Accuracy, Loss

from eventloop import Bus, ConfigurationError, Event, SubscribeError, TrainingError, from_json
from eventloop.errors import CheckpointError
from hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    IterTimerHook,
    LoggerHook,
    OptimizerHook,
    ParamSchedulerHook,
    PreemptionHook,
    ProfilerHook,
    RuntimeInfoHook,
)
from hooks.writers import JSONLinesWriter

from .jobs import Counting, assert_same, batches, heard, network, weights_of

logging.getLogger("ignite").setLevel(logging.CRITICAL)


class Job:
    """A training of a small network, as Ignite's users write it."""

    def __init__(self, bus=None, *, deterministic=False, accumulate=1, lr=0.1, **options):
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        loss = nn.CrossEntropyLoss()
        self.trainer = create_supervised_trainer(
            self.model, self.optimizer, loss, deterministic=deterministic, gradient_accumulation_steps=accumulate
        )
        self.evaluator = create_supervised_evaluator(self.model, {"accuracy": Accuracy(), "loss": Loss(loss)})
        self.bus = bus
        self.bridge = None if bus is None else bus.attach(self.trainer, evaluator=self.evaluator, **options)

    def validating(self, event=Events.EPOCH_COMPLETED):
        self.trainer.add_event_handler(event, lambda: self.evaluator.run(batches(2, seed=9)))
        return self

    def load(self, path):
        Checkpoint.load_objects(self.bridge.to_save, torch.load(path, weights_only=True))
        return self

    def weights(self):
        return weights_of(self.model)


STEP = ["before_train_iter", "before_optimizer_step", "after_optimizer_step", "after_train_iter"]
VAL = ["before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val"]


def test_the_mount_points_come_in_the_order_of_our_own_loop():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    job.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: job.evaluator.run(batches(1)))
    job.trainer.run(batches(1), max_epochs=1)
    train = ["before_train_epoch", *STEP, "after_train_epoch", *VAL]
    assert names == ["before_run", "before_train", *train, "after_train", "after_run"]


def test_a_bus_changes_no_bit_of_the_weights():
    plain = Job().validating()
    plain.trainer.run(batches(), max_epochs=50)
    bus = Bus()
    bus.add(EMAHook(), RuntimeInfoHook(), IterTimerHook())
    bus.on(Event, lambda event: None)
    job = Job(bus).validating()
    job.trainer.run(batches(), max_epochs=50)
    assert job.bridge.run.counters.iter == 200
    assert_same(plain.weights(), job.weights())


def test_events_have_batch_loss_and_counts_from_zero():
    bus, seen = Bus(), []
    bus.on("after_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.progress.iter, e.progress.update, e)))
    job, losses = Job(bus), []
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    data = batches(2)
    job.trainer.run(data, max_epochs=2)
    assert [counts[:4] for counts in seen] == [(0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 2, 2), (1, 1, 3, 3)]
    assert [event.outputs["loss"] for *_, event in seen] == losses
    assert seen[1][-1].batch is data[1]
    assert seen[0][-1].progress.max_epochs == 2


def test_the_last_batch_and_the_lengths_are_known():
    bus, last = Bus(), []
    bus.on("before_train_iter", lambda e: last.append((e.run.last_batch, e.run.epoch_length, e.run.total_iters)))
    Job(bus).trainer.run(batches(2), max_epochs=2)
    assert last == [(False, 2, 4), (True, 2, 4)] * 2


def test_the_loss_is_not_divided_by_the_accumulation_and_only_steps_are_updates():
    bus, seen = Bus(), []
    bus.on("after_train_iter", lambda event: seen.append((event.run.updated, event.outputs["loss"])))
    job = Job(bus, accumulate=2, lr=0.0)
    job.trainer.run(batches(4), max_epochs=1)
    assert [updated for updated, _ in seen] == [False, True, False, True]
    assert job.bridge.run.counters.update == 2
    assert all(0.5 < loss < 3 for _, loss in seen)


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
    bridge = bus.attach(trainer)
    assert bridge.to_save["scaler"] is scaler
    trainer.run([torch.ones(1, 2), torch.full((1, 2), float("inf")), torch.ones(1, 2)])
    assert updated == [1.0, True, False, 1.0, True]


def test_output_transform_names_what_a_step_returns():
    bus, seen = Bus(), []
    bus.on("after_train_iter", lambda event: seen.append(event.outputs))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine, batch):
        optimizer.step()
        model(batch)
        return batch, 0.5

    for transform in (None, lambda output: output[1], lambda output: {"mine": output[1]}):
        trainer = Engine(step)
        with bus.attach(trainer, output_transform=transform):
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

    def __call__(self, engine, batch):
        return self.step(engine, batch)


def step_with(model, optimizer, engine, batch):
    model(batch).backward()
    optimizer.step()


def test_several_models_and_optimizers_are_found_by_name_and_frozen_ones_are_not():
    for make in (lambda steps: steps, lambda steps: steps.step):
        bus, stepped = Bus(), []
        bus.on("after_optimizer_step", lambda event, stepped=stepped: stepped.append(event.name))
        steps = Steps()
        trainer = Engine(make(steps))
        bridge = bus.attach(trainer)
        trainer.run([torch.ones(1)] * 2)
        assert bridge.run.models == {"generator": steps.generator, "critic": steps.critic}
        assert bridge.run.optimizers == {"one": steps.one, "two": steps.two}
        assert stepped == ["one", "two", "one"]


def test_the_model_is_found_in_a_partial_and_given_ones_win():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    trainer = Engine(partial(step_with, model, optimizer))
    with Bus().attach(trainer) as bridge:
        trainer.run([torch.ones(1)])
        assert bridge.run.models == {"model": model}
    with Bus().attach(trainer, model=other) as bridge:
        trainer.run([torch.ones(1)])
        assert bridge.run.models == {"model": other}


def test_a_training_step_without_optimizer_is_an_error_that_asks_for_it():
    with pytest.raises(ConfigurationError, match=r"no optimizer in the training step .*optimizer=\.\.\.\)"):
        Bus().attach(Engine(lambda engine, batch: None))
    stray = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="no model in the training step"):
        Bus().attach(Engine(lambda engine, batch: None), optimizer=stray)


def test_wrong_options_and_a_second_bus_are_errors():
    job = Job(Bus())
    with pytest.raises(ConfigurationError, match=r"evaluators=.*not an option for an ignite.*evaluator"):
        Bus().attach(Job().trainer, evaluators=job.evaluator)
    with pytest.raises(ConfigurationError, match="evaluator="):
        Bus().attach(Job().trainer, evaluator=nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="the trainer itself"):
        plain = Job()
        Bus().attach(plain.trainer, evaluator=plain.trainer)
    with pytest.raises(SubscribeError, match="attached to this Engine already"):
        Bus().attach(job.trainer)


@pytest.mark.parametrize("evaluated", [False, True])
def test_detaching_leaves_the_engines_as_they_were(evaluated):
    job = Job()
    engines = [job.trainer, job.evaluator]
    before = [dict(vars(engine)) for engine in engines]
    bus = Bus()
    names = heard(bus)
    with bus.attach(job.trainer, evaluator=job.evaluator if evaluated else None) as bridge:
        job.trainer.run(batches(1))
        job.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: bridge.detach())
        with pytest.raises(TrainingError, match="while an ignite"):
            job.trainer.run(batches(1))
    for engine, attributes in zip(engines, before, strict=True):
        assert vars(engine).keys() == attributes.keys()
        for name in ("_process_function", "logger"):
            assert vars(engine)[name] is attributes[name]
        assert Events.EXCEPTION_RAISED not in engine._event_handlers
    names.clear()
    job.trainer._event_handlers.clear()
    for _ in range(2):  # Ignite's first run after an exception does nothing
        job.trainer.run(batches(1))
    assert names == []


def test_missing_mount_points_are_warned_about_but_not_for_hooks_of_validations():
    bus = Bus()
    bus.add(EMAHook(), RuntimeInfoHook())
    with structlog.testing.capture_logs() as logs:
        bridge = bus.attach(Job().trainer)
        assert logs == []
        bus.on("before_backward", print)
        bus.on("after_test", print)
    assert [(one["mount_point"], one["reason"]) for one in logs] == [
        (name, bridge.missing[name]) for name in ("before_backward", "after_test")
    ]


# ---------------------------------------------------------------------------------------------------------------- validation


def test_a_validation_is_the_run_of_the_evaluator_with_its_metrics():
    bus, seen = Bus(), []
    bus.on("after_val_epoch", lambda e: seen.append((e.progress.epoch, e.progress.iter, e.metrics, e.run.evaluation_length)))
    bus.on("before_val", lambda event: seen.append(event.run.training))
    job = Job(bus)
    metrics = []
    job.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=3) | Events.COMPLETED,
        lambda: metrics.append(dict(job.evaluator.run(batches(2)).metrics)),
    )
    job.trainer.run(batches(4), max_epochs=1)
    assert seen == [True, (0, 3, metrics[0], 2), True, (1, 4, metrics[1], 2)]
    assert set(metrics[0]) == {"accuracy", "loss"}


def test_a_validation_before_the_training_is_part_of_it():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    job.trainer.add_event_handler(Events.STARTED, lambda: job.evaluator.run(batches(1)))
    job.trainer.run(batches(1))
    assert names[:9] == ["before_run", "before_train", *VAL, "before_train_epoch"]


def test_an_evaluator_alone_is_a_run_with_a_validation():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    job.evaluator.run(batches(1))
    assert names == ["before_run", *VAL, "after_run"]
    names.clear()
    job.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.evaluator.run(batches(1))
    assert names == ["before_run", *VAL[:4], "on_exception"]
    assert bus.state == "idle"


def test_the_evaluator_sees_the_averaged_weights_and_the_training_the_raw_ones():
    bus, ema = Bus(), EMAHook(momentum=0.5)
    bus.add(ema)
    plain = Job()
    plain.trainer.run(batches(), max_epochs=2)
    job, seen = Job(bus).validating(), []
    job.evaluator.add_event_handler(Events.COMPLETED, lambda: seen.append(job.weights()["0.weight"]))
    job.trainer.run(batches(), max_epochs=2)
    assert torch.equal(seen[-1], ema.average.tensors["0.weight"])
    assert_same(job.weights(), plain.weights())


def test_a_validation_that_is_cut_short_has_no_end():
    bus, ema = Bus(), EMAHook()
    bus.add(ema)
    job = Job(bus).validating()
    names = heard(bus)
    job.evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=1), job.evaluator.terminate)
    job.trainer.run(batches(1))
    assert names[-4:] == ["before_val_iter", "after_val_iter", "after_train", "after_run"]
    assert not ema.average.swapped


def test_a_validation_whose_error_is_caught_is_undone():
    bus, ema = Bus(), EMAHook()
    bus.add(ema)
    job = Job(bus)
    names = heard(bus)
    job.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 / 0)

    @job.trainer.on(Events.EPOCH_COMPLETED)
    def validate():
        with suppress(ZeroDivisionError):
            job.evaluator.run(batches(1))

    job.trainer.run(batches(1), max_epochs=2)
    assert names.count("after_train_epoch") == 2
    assert "on_exception" not in names
    assert "after_val" not in names
    assert not ema.average.swapped


# ---------------------------------------------------------------------------------------------------------------- stopping


def test_stop_terminates_the_engine_after_the_iteration():
    bus = Bus()
    names = heard(bus)
    bus.on("after_train_iter", lambda event: event.progress.iter == 1 and event.run.stop("enough"))
    job = Job(bus)
    state = job.trainer.run(batches(4), max_epochs=3)
    assert (state.iteration, state.epoch) == (2, 1)
    assert names[-2:] == ["after_train", "after_run"]
    assert "after_train_epoch" not in names
    assert job.bridge.run.info["stop_reason"] == "enough"


def test_a_stop_waits_for_the_step_of_the_window():
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.stop(), once=1)
    assert Job(bus, accumulate=3).trainer.run(batches(6)).iteration == 3


def test_a_stop_before_the_training_trains_nothing():
    bus = Bus()
    names = heard(bus)
    bus.on("before_train", lambda event: event.run.stop())
    assert Job(bus).trainer.run(batches(4)).iteration == 0
    assert names == ["before_run", "before_train", "after_train", "after_run"]


def test_a_stop_in_a_validation_ends_validation_and_training():
    bus = Bus()
    bus.on("after_val_iter", lambda event: event.run.stop(), once=1)
    names = heard(bus)
    state = Job(bus).validating().trainer.run(batches(2), max_epochs=5)
    assert (state.epoch, names.count("after_val_iter")) == (1, 1)
    assert "after_val" not in names


def test_early_stopping_stops_the_engine():
    bus = Bus()
    bus.add(EarlyStoppingHook("accuracy", min_delta=10.0, patience=2))
    state = Job(bus).validating().trainer.run(batches(2), max_epochs=20)
    assert state.epoch == 3


def test_early_stopping_without_evaluator_is_an_error_at_once():
    bus = Bus()
    bus.add(EarlyStoppingHook("accuracy"))
    job = Job()
    bus.attach(job.trainer)
    with pytest.raises(ConfigurationError, match="needs a metric of validations"):
        job.trainer.run(batches(2))
    assert job.trainer.state.iteration == 0
    assert bus.state == "idle"


def test_ignites_own_early_stopping_and_terminations_are_followed():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    stopping = EarlyStopping(patience=1, score_function=lambda engine: 0.0, trainer=job.trainer)
    job.evaluator.add_event_handler(Events.COMPLETED, stopping)
    job.validating()
    assert job.trainer.run(batches(2), max_epochs=9).epoch == 2
    assert names.count("after_train_epoch") == names.count("after_val_epoch") == 2


def test_an_epoch_that_the_engine_ends_early_ends_if_ignite_says_so():
    for skip, ended in ((False, 2), (True, 1)):
        bus, epochs = Bus(), []
        names = heard(bus)
        bus.on("before_train_iter", lambda e, epochs=epochs: epochs.append((e.progress.epoch, e.batch_idx, e.progress.iter)))
        job = Job(bus)
        job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), partial(job.trainer.terminate_epoch, skip))
        job.trainer.run(batches(3), max_epochs=2)
        assert epochs[:4] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        assert names.count("after_train_epoch") == ended
        assert names.count("before_train_epoch") == 2


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging")
def test_a_learning_rate_finder_may_make_the_run_longer():
    seen, bus = [], Bus()
    bus.on("before_train_epoch", lambda event: seen.append((event.progress.max_epochs, event.run.total_iters)))
    job, finder = Job(bus), FastaiLRFinder()
    with finder.attach(job.trainer, {"model": job.model, "optimizer": job.optimizer}, num_iter=5, diverge_th=1e9) as trainer:
        trainer.run(batches(4))
    assert len(finder.get_results()["lr"]) == job.bridge.run.counters.iter == 5
    assert seen == [(None, 5)] * 2


def test_a_limit_and_data_that_handlers_change_are_those_of_the_next_epoch():
    seen, bus, other = [], Bus(), batches(4, seed=1)
    bus.on("before_train_epoch", lambda event: seen.append((event.progress.max_epochs, event.run.train_data)))
    job, first = Job(bus), batches(4)

    @job.trainer.on(Events.EPOCH_COMPLETED(once=1))
    def change(engine):
        engine.state.max_epochs = 3
        engine.set_data(other)

    job.trainer.run(first, max_epochs=2)
    assert [(limit, data is other) for limit, data in seen] == [(2, False), (3, True), (3, True)]


@pytest.mark.skipif("max_iters" not in inspect.signature(Engine.run).parameters, reason="Ignite has max_iters since 0.5.5")
def test_an_engine_with_both_limits_is_run_again():
    class Unsized:
        def __iter__(self):
            return iter(batches(4))

    job = Job(Bus())
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), job.trainer.terminate)
    job.trainer.run(Unsized(), max_iters=10)
    assert job.trainer.state.max_epochs == 3  # Ignite sets it when the data has ended once
    job.trainer.run(Unsized())
    assert job.bridge.run.counters.iter == job.trainer.state.iteration == 10


@pytest.mark.skipif("max_iters" not in inspect.signature(Engine.run).parameters, reason="Ignite has max_iters since 0.5.5")
def test_max_iters_ends_within_an_epoch():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    job.trainer.run(batches(2), max_iters=3)
    counters = job.bridge.run.counters
    assert (counters.iter, counters.max_iters, counters.max_epochs) == (3, 3, None)
    assert names.count("after_train_epoch") == 1
    assert names[-2:] == ["after_train", "after_run"]


def test_epoch_length_and_iterators_of_unknown_length():
    bus, seen = Bus(), []
    bus.on("before_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.run.epoch_length)))
    job = Job(bus)
    job.trainer.run(batches(2), max_epochs=2, epoch_length=3)
    assert seen == [(epoch, index, 3) for epoch in range(2) for index in range(3)]
    seen.clear()
    other = Job(Bus())
    other.bus.on("before_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.run.epoch_length)))
    data = batches(2)
    other.trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: other.trainer.set_data(iter(data)))
    other.trainer.run(iter(data), max_epochs=1)
    assert seen == [(0, 0, None), (0, 1, None)]


def test_a_pause_and_rates_work_between_iterations():
    bus, rates = Bus(), []
    bus.on("after_train_iter", lambda event: event.run.set_lr(0.5), once=1)
    job = Job(bus)
    job.trainer.add_event_handler(Events.ITERATION_STARTED, lambda: rates.append(job.optimizer.param_groups[0]["lr"]))
    job.trainer.run(batches(2))
    assert rates == [0.1, 0.5]


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED])
def test_an_exception_in_a_handler_of_ignite_is_told_and_raised(event):
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    job.trainer.add_event_handler(event, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.trainer.run(batches(2))
    assert names[-1:] == ([] if event == Events.STARTED else ["on_exception"])
    assert "after_train" not in names
    assert bus.state == "idle"


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_exception_in_the_step_is_told_first_then_scopes_end(error):
    bus, order = Bus(), []
    bus.on("before_train_iter", lambda event: event.run.defer(lambda: order.append("undone")))
    bus.on("on_exception", lambda event: order.append(event.exception))
    job = Job(bus)
    job.model.register_forward_hook(lambda *call: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)) as raised:
        job.trainer.run(batches(2))
    assert raised.value is error
    assert order == [error, "undone"]


def test_the_error_of_a_hook_is_raised_once_through_the_engine():
    bus, told = Bus(), []
    bus.on("on_exception", lambda event: told.append(event.error))

    @bus.on("after_train_iter")
    def broken(event):
        raise ValueError("in a hook")

    with pytest.raises(ValueError, match="in a hook"):
        Job(bus).trainer.run(batches(2))
    assert told == ["ValueError: in a hook"]


def test_an_exception_that_a_handler_of_ignite_swallows_ends_the_run_as_failed():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    swallowed = []
    job.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: swallowed.append(error))

    @bus.on("after_train_iter", once=2)
    def interrupt(event):
        raise KeyboardInterrupt

    job.trainer.run(batches(4))
    assert isinstance(swallowed[0], KeyboardInterrupt)
    assert names[-1] == "on_exception"
    assert bus.state == "idle"


def test_training_goes_on_if_ignite_does_after_an_exception():
    bus = Bus()
    names = heard(bus)
    job = Job(bus)
    job.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)

    @bus.on("before_optimizer_step", once=2)
    def broken(event):
        raise ValueError

    state = job.trainer.run(batches(2), max_epochs=2)
    assert state.epoch == 2
    assert names[-2:] == ["after_train", "after_run"]
    assert job.bridge.run.counters.iter == state.iteration


# ---------------------------------------------------------------------------------------------------------------- checkpoints


def full(bus):
    hook, ema = Counting(), EMAHook(momentum=0.1)
    bus.add(hook, ema, RuntimeInfoHook())
    return hook, ema


def shuffled():
    inputs, labels = zip(*batches(), strict=True)
    return DataLoader(TensorDataset(torch.cat(inputs), torch.cat(labels)), batch_size=8, shuffle=True)


# Where Ignite resumes exactly: between epochs with a loader that shuffles, and in an epoch with data in a fixed order.
@pytest.mark.parametrize(("stop_at", "data"), [(8, shuffled), (6, batches)])
def test_a_resumed_training_goes_on_exactly(tmp_path, stop_at, data):
    def train(job):
        torch.manual_seed(1)
        job.trainer.run(data(), max_epochs=5)
        return job

    plain = train(Job(deterministic=True))
    whole = Job(Bus(), deterministic=True)
    hook, ema = full(whole.bus)
    train(whole)

    cut = Job(Bus(), deterministic=True)
    full(cut.bus)
    saver = Checkpoint(cut.bridge.to_save, DiskSaver(tmp_path))
    cut.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), saver)
    cut.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at + 1), cut.trainer.terminate)
    train(cut)

    rest = Job(Bus(), deterministic=True)
    counted, average = full(rest.bus)
    names, indices = heard(rest.bus), []
    rest.bus.on("before_train_iter", lambda event: indices.append((event.progress.epoch, event.batch_idx)))
    saved = torch.load(tmp_path / saver.last_checkpoint, weights_only=False)  # Ignite's engine saves the states of NumPy
    Checkpoint.load_objects(rest.bridge.to_save, saved)
    train(rest)

    assert_same(whole.weights(), plain.weights())
    assert_same(rest.weights(), whole.weights())
    assert_same(average.average.tensors, ema.average.tensors)
    assert counted.iters == hook.iters == [(i // 4, i, i % 4) for i in range(20)]
    assert rest.bridge.run.counters.saved() == whole.bridge.run.counters.saved()
    assert indices == [divmod(index, 4) for index in range(stop_at, 20)]
    assert names[:3] == ["before_run", "after_load_checkpoint", "before_train"]


def test_checkpoint_hook_has_ignite_save_files_that_ignite_loads(tmp_path):
    bus, told = Bus(), []
    ema = EMAHook(momentum=0.1)
    bus.add(ema, CheckpointHook(interval=1, save_best="accuracy", max_keep_ckpts=1))
    bus.on("checkpoint_committed", lambda event: told.append(event.path))
    job = Job(bus, work_dir=tmp_path).validating()
    job.trainer.run(batches(), max_epochs=3)
    best, last = sorted(path.name for path in tmp_path.iterdir())
    assert last == "epoch_3.pt"
    assert best.startswith("best_accuracy_epoch_")
    assert told[0] == str(tmp_path / "epoch_1.pt")
    saved = torch.load(tmp_path / "epoch_3.pt", weights_only=True)
    assert_same(dict(saved["model"]), {**job.weights(), **ema.average.tensors})
    other = Job()
    objects = {"model": other.model, "optimizer": other.optimizer, "trainer": other.trainer}
    Checkpoint.load_objects(objects, tmp_path / "epoch_3.pt")
    assert other.trainer.state.iteration == 12


def test_a_resume_from_a_file_with_averaged_weights_is_exact(tmp_path):
    def make(folder):
        job = Job(Bus(), work_dir=folder)
        job.model[3].p = 0.0
        job.bus.add(ema := EMAHook(momentum=0.1))
        return job, ema

    whole, ema = make(tmp_path / "whole")
    whole.trainer.run(batches(), max_epochs=4)
    cut, _ = make(tmp_path / "cut")
    cut.bus.add(CheckpointHook(interval=2))
    cut.trainer.run(batches(), max_epochs=2)
    rest, average = make(tmp_path / "cut")
    rest.load(tmp_path / "cut" / "epoch_2.pt").trainer.run(batches(), max_epochs=4)
    assert_same(rest.weights(), whole.weights())
    assert_same(average.average.tensors, ema.average.tensors)


def test_the_best_checkpoint_of_ignite_has_the_averaged_weights(tmp_path):
    bus, ema, told = Bus(), EMAHook(momentum=0.1), []
    bus.add(ema)
    bus.on("checkpoint_committed", lambda event: told.append(event.path))
    job = Job(bus).validating()
    best = Checkpoint(
        {"model": job.model, "bus": job.bridge},
        DiskSaver(tmp_path),
        score_function=Checkpoint.get_default_score_fn("accuracy"),
        n_saved=1,
    )
    job.evaluator.add_event_handler(Events.COMPLETED, best)
    job.trainer.run(batches(), max_epochs=1)
    saved = torch.load(tmp_path / best.last_checkpoint, weights_only=True)
    for name, tensor in ema.average.tensors.items():
        assert torch.equal(saved["model"][name], tensor)
    assert told == [str(tmp_path / best.last_checkpoint)]


def test_a_requested_save_has_what_handlers_of_ignite_did_in_the_iteration(tmp_path):
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.checkpoint_now(), once=2)
    job = Job(bus, work_dir=tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
    job.bridge.to_save["schedule"] = schedule
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    job.trainer.run(batches())
    saved = torch.load(tmp_path / "iter_2.pt", weights_only=True)
    assert saved["schedule"]["last_epoch"] == 2
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.1 / 4


def test_checkpoint_hook_without_a_directory_says_so_at_once():
    bus = Bus()
    bus.add(CheckpointHook(interval=1))
    with pytest.raises(ConfigurationError, match="work_dir"):
        Job(bus).trainer.run(batches())


def test_the_state_of_the_bus_is_refused_where_it_makes_no_sense():
    job = Job(Bus())
    with pytest.raises(TrainingError, match="before the first"):
        job.bridge.state_dict()
    with pytest.raises(CheckpointError, match="state of a bus"):
        job.bridge.load_state_dict({"epoch": 1})
    job.trainer.add_event_handler(Events.EPOCH_STARTED, lambda: job.bridge.load_state_dict(job.bridge.state_dict()))
    with pytest.raises(TrainingError, match="while the trainer runs"):
        job.trainer.run(batches())


def test_a_checkpoint_without_a_bus_continues_with_the_counts_of_the_engine():
    bus = Bus()
    bus.add(hook := Counting())
    job, seen = Job(bus), []
    bus.on("before_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.progress.iter)), once=5)
    job.trainer.load_state_dict({"iteration": 4, "epoch_length": 4, "max_epochs": 2})
    with structlog.testing.capture_logs() as logs:
        job.trainer.run(batches(), max_epochs=2)
    assert "saved without this bus" in logs[0]["event"]
    assert seen == [(1, 0, 4)]
    assert len(hook.iters) == 4


def test_a_forgotten_trainer_is_a_warning():
    job = Job(Bus())
    job.trainer.run(batches())
    other = Job(Bus())
    other.bridge.load_state_dict(job.bridge.state_dict())
    with structlog.testing.capture_logs() as logs:
        other.trainer.run(batches())
    assert any("load the trainer" in one["event"] for one in logs)
    assert other.bridge.run.counters.iter == 4


def test_a_second_run_of_the_engine_continues_where_ignite_does():
    bus, seen = Bus(), []
    bus.on("before_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.progress.iter, e.progress.update)))
    job = Job(bus)
    job.trainer.run(batches(2), max_epochs=1)
    with structlog.testing.capture_logs() as logs:
        job.trainer.run(batches(2), max_epochs=2)
    assert seen[2:] == [(1, 0, 2, 2), (1, 1, 3, 3)]
    assert logs == []
    seen.clear()
    job.trainer.run(batches(2), max_epochs=2)  # a new training
    assert seen[0] == (0, 0, 0, 0)


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_an_interrupted_engine_continues_in_the_epoch(event):
    bus, seen = Bus(), []
    bus.on("before_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.progress.iter)))
    job = Job(bus)
    job.trainer.add_event_handler(event(once=2), job.trainer.interrupt)
    data = batches(2)
    job.trainer.run(data, max_epochs=3)
    assert bus.state == "idle"
    assert len(seen) < 6
    job.trainer.run(data, max_epochs=3)
    assert seen == [(index // 2, index % 2, index) for index in range(6)]


def test_a_terminated_engine_continues_with_the_next_epoch():
    bus, seen = Bus(), []
    bus.on("before_train_iter", lambda e: seen.append((e.progress.epoch, e.batch_idx, e.progress.iter)))
    job = Job(bus)
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), job.trainer.terminate)
    job.trainer.run(batches(2), max_epochs=2)
    job.trainer.run(batches(2), max_epochs=2)
    assert seen == [(0, 0, 0), (1, 0, 1), (1, 1, 2)]


# ---------------------------------------------------------------------------------------------------------------- our hooks


def test_hooks_that_report_work(tmp_path):
    bus = Bus()
    bus.add(LoggerHook(interval=1, writers=[JSONLinesWriter()]), IterTimerHook(), RuntimeInfoHook())
    job = Job(bus, work_dir=tmp_path).validating()
    job.trainer.run(batches(), max_epochs=2)
    lines = (tmp_path / "scalars.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4 + 2
    assert '"train/loss"' in lines[0]
    assert '"train/eta"' in lines[0]
    assert "val/accuracy" in job.bridge.run.info


def test_an_invalid_loss_ends_the_training():
    bus = Bus()
    bus.add(CheckInvalidLossHook(interval=1))
    job = Job(bus, lr=float("nan"))
    with pytest.raises(Exception, match="loss"):
        job.trainer.run(batches(), max_epochs=3)


def test_our_schedules_work_and_our_optimizer_hook_is_refused():
    bus = Bus()
    job = Job(bus)
    bus.add(ParamSchedulerHook(torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5), by="iter"))
    job.trainer.run(batches(2))
    assert job.optimizer.param_groups[0]["lr"] == 0.1 / 4
    other = Bus()
    other.add(OptimizerHook())
    with pytest.raises(ConfigurationError, match="the trainer steps the optimizers"):
        Job(other).trainer.run(batches(2))


def test_offloaded_handlers_get_every_iteration():
    bus, seen = Bus(), []

    @bus.on("after_train_iter")
    async def ship(event):
        seen.append(event.outputs["loss"])

    Job(bus).trainer.run(batches(), max_epochs=2)
    assert len(seen) == 8


def test_deterministic_engines_are_known_by_their_base():
    bus = Bus()
    names = heard(bus)
    job = Job(bus, deterministic=True)
    assert isinstance(job.trainer, DeterministicEngine)
    job.trainer.run(batches(1))
    assert "after_train_iter" in names


def test_a_signal_saves_and_ends_the_training_in_order(tmp_path):
    bus, hook = Bus(), PreemptionHook()
    bus.add(hook)
    names = heard(bus)
    bus.on("after_train_iter", lambda event: event.progress.iter == 2 and signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    job = Job(bus, work_dir=tmp_path)
    job.trainer.run(batches(4), max_epochs=2)
    assert hook.received is signal.SIGTERM
    assert job.trainer.state.iteration == 3
    assert [name for name in names if name in ("after_train", "after_run", "on_exception")] == ["after_train", "after_run"]
    assert signal.getsignal(signal.SIGTERM) is before
    (saved,) = (path for path in tmp_path.iterdir() if path.name.startswith("iter_3"))
    resumed = Job(Bus(Counting()), work_dir=tmp_path / "resumed").load(saved)
    resumed.trainer.run(batches(4), max_epochs=2)
    assert resumed.trainer.state.iteration == 8


def test_profiler_and_module_events(tmp_path):
    bus, seen = Bus(), []
    bus.add(ProfilerHook(by_epoch=False, profile_times=2, activities="cpu", json_trace_path="trace.json"))
    job = Job(bus, work_dir=tmp_path)
    bus.watch(job.model, "0")
    bus.on("after_module_forward", lambda event: seen.append(event.module_name))
    job.trainer.run(batches(3), max_epochs=1)
    assert seen == ["0"] * 3
    assert (tmp_path / "trace.json").is_file()


@pytest.mark.anyio
async def test_a_web_application_streams_while_ignite_trains_in_a_thread():
    anyio, httpx = pytest.importorskip("anyio"), pytest.importorskip("httpx")
    applications, responses = pytest.importorskip("starlette.applications"), pytest.importorskip("starlette.responses")
    from starlette.routing import Route

    bus = Bus()
    job = Job(bus)

    async def events(request):
        stream = bus.stream("after_train_iter")

        async def lines():
            async with anyio.create_task_group() as group, stream:
                group.start_soon(partial(anyio.to_thread.run_sync, partial(job.trainer.run, batches(4), max_epochs=2)))
                async for event in stream:
                    yield event.to_json() + b"\n"
                    if event.progress.iter == 7:
                        break

        return responses.StreamingResponse(lines())

    app = applications.Starlette(routes=[Route("/events", events)])
    async with bus, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        lines = (await client.get("/events")).text.splitlines()
    assert [from_json(line).progress.iter for line in lines] == list(range(8))


@pytest.fixture
def anyio_backend():
    return "asyncio"
