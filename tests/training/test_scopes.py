"""Exceptions, stops and what is undone: how the scopes of a run end."""

import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from functools import partial

import anyio
import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Hook, Run, RunCancelled, Update, mount
from trainbus.eventloop.errors import StopIterationError
from trainbus.eventloop.training import run as run_module
from trainbus.eventloop.training import state as state_module
from trainbus.eventloop.training.machine import RUN, VAL, Machine
from trainbus.eventloop.training.saves import requests as saves_module
from trainbus.hooks import CheckpointHook

from ..failing import fails
from ..waiting import on_threads, until
from .conftest import MOUNT_POINTS


def stack_of(thread: threading.Thread) -> set[str]:
    """Return the qualified names of the functions that a thread is in."""
    frames = traceback.walk_stack(sys._current_frames()[thread.ident])
    return {frame.f_code.co_qualname for frame, _ in frames}


class Boom(Exception):  # noqa: N818 - short, it is everywhere below
    pass


# ------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("error", [Boom("step"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_exception_is_published_first_and_ends_scopes_without_after_x(parts, bus, trace, error):
    loop = parts.loop(bus, step=fails(error), sanity=0)
    with pytest.raises(type(error)) as caught:
        loop.run()
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"  # in the user's step
    assert trace.names == parts.spell("before_run before_train before_train_epoch before_train_iter on_exception")
    (heard,) = trace.of("on_exception")
    assert heard.exception is error
    assert heard.error == f"{type(error).__name__}: {error}"
    assert bus.state == "idle"


@pytest.mark.parametrize("mount_point", MOUNT_POINTS)
def test_a_stop_iteration_in_a_hook_is_an_error_wherever_it_is_raised(parts, bus, mount_point):
    """It becomes an error that no iterator of a run takes for its end, and the last event is that of the error."""
    trace = parts.Trace(bus, inside=True)
    loop, error = parts.loop(bus), StopIteration(mount_point)
    bus.on(mount_point, fails(error), priority=100)
    with pytest.raises(StopIterationError, match=f"fail of {mount_point}") as caught:
        loop.run()
    assert error is caught.value.__cause__
    assert trace.names[-1] == "on_exception"
    assert trace.names.count("on_exception") == 1
    heard = trace.names[trace.names.index(mount_point) + 1 :]
    inside = {"after_backward", "after_optimizer_step"} if mount_point == "after_train_iter" else set()
    assert not [name for name in heard if name.startswith("after_") and name not in inside]
    note = caught.value.__notes__[0]
    assert note.startswith("in fail (inline, priority 100, tests/failing.py:")
    assert f"at {mount_point}" in note


def fails_after(batches):
    yield from batches
    raise Boom("disk")


def fails_with(parts, errors):
    """A step that raises the errors of a list, until it is empty."""
    return lambda model, batch: fails(errors.pop())() if errors else parts.step(model, batch)


def test_an_exception_in_the_training_loader_ends_the_run(parts, bus, trace):
    with pytest.raises(Boom):
        parts.loop(bus, train_data=fails_after(parts.batches(2)), max_epochs=1).run()
    assert trace.names == parts.spell(
        "before_run before_train before_train_epoch 2*(before_train_iter after_train_iter) on_exception"
    )


@pytest.mark.parametrize("fault", ["loader", "step"])
def test_an_exception_in_a_validation_restores_mode_and_gradients_after_on_exception(parts, bus, trace, fault):
    data = parts.batches(1)
    options = (
        {"val_data": fails_after(data), "max_epochs": 1} if fault == "loader" else {"val_data": data, "val_step": fails(Boom)}
    )
    loop = parts.loop(bus, sanity=0, **options)
    seen = []
    bus.on("on_exception", lambda e: seen.append(loop.model.training))
    with pytest.raises(Boom):
        loop.run()
    assert trace.names[-2:] == ["after_val_iter" if fault == "loader" else "before_val_iter", "on_exception"]
    assert trace.names.count("after_val_iter") == (fault == "loader")
    assert seen == [False]
    assert loop.model.training
    assert torch.is_grad_enabled()


def test_the_users_exception_survives_failing_handlers_of_on_exception_and_failing_undos(parts, bus):
    error = Boom("mine")
    undone = []
    bus.on("before_run", lambda e: e.run.defer(lambda: undone.append("outer")))
    bus.on("before_train_iter", lambda e: e.run.defer(lambda: undone.append("inner")))
    bus.on("before_train_iter", lambda e: e.run.defer(fails(ValueError("undo"))))
    bus.on("on_exception", fails(ValueError("handler")))
    with pytest.raises(Boom) as caught:
        parts.loop(bus, step=fails(error), sanity=0).run()
    assert caught.value is error
    assert any("on_exception failed" in note and "handler" in note for note in error.__notes__)
    assert undone == ["inner", "outer"]
    assert bus.state == "idle"


def test_a_failing_undo_ends_a_run_that_went_well(parts, bus, trace):
    bus.on("before_train_epoch", lambda e: e.run.defer(fails(Boom("undo"))))
    with pytest.raises(Boom, match="undo"):
        parts.loop(bus).run()
    assert trace.names[-2:] == ["after_train_epoch", "on_exception"]


@pytest.mark.parametrize("strikes", [1, 2, 3])
def test_an_interrupted_deferred_call_is_repeated_and_others_run(strikes):
    calls = []

    def undo():
        calls.append("second")
        if len(calls) <= strikes:
            raise KeyboardInterrupt

    machine = Machine()
    machine.enter(RUN)
    machine.defer(lambda: calls.append("first"))
    machine.enter(VAL)
    machine.defer(undo)
    with pytest.raises(KeyboardInterrupt):
        machine.leave(RUN)
    with pytest.raises(KeyboardInterrupt) if strikes > 1 else nullcontext():
        machine.unwind()
    assert calls == ["second", "second", "first"]
    assert not machine.is_open


class Ship(Hook):
    """Opens a client, defers its close, and uses it in offloaded methods."""

    def __init__(self):
        self.open = 0
        self.used, self.closed = [], []

    @mount("before_run", "before_train_epoch")
    def connect(self, event):
        self.open += 1
        event.run.defer(partial(self.close, event.mount_point))

    def close(self, name):
        self.open -= 1
        self.closed.append((name, len(self.used)))

    async def after_train_iter(self, event):
        await anyio.sleep(0.01)
        self.use(event)

    @mount("checkpoint_committed", "on_exception", offload="thread")
    def others(self, event):
        threading.Event().wait(0.01)
        self.use(event)

    def use(self, event):
        assert self.open
        self.used.append(event.mount_point)

    def after_run(self, event):
        self.closed.append(("after_run", len(self.used)))


def test_what_a_hook_deferred_and_its_after_run_come_when_its_lanes_are_empty(parts, tmp_path):
    bus = Bus(CheckpointHook(1), ship := Ship())
    parts.loop(bus, train_data=parts.batches(3), max_epochs=2, work_dir=tmp_path).run()
    assert sorted(ship.used) == ["after_train_iter"] * 6 + ["checkpoint_committed"] * 2
    # At the end of an epoch its file may still be written.
    (first, one), (second, two), *ends = ship.closed
    assert (first, second) == ("before_train_epoch", "before_train_epoch")
    assert one >= 3
    assert two >= 6
    assert ends == [("after_run", 8), ("before_run", 8)]


@pytest.mark.long
def test_after_an_exception_what_a_hook_deferred_comes_when_its_lanes_are_empty_or_the_bus_waits_no_longer(parts):
    bus = Bus(ship := Ship())
    bus.on("after_train_iter", lambda event: event.batch_idx == 2 and fails(Boom)(), priority=95)
    with pytest.raises(Boom):
        parts.loop(bus, train_data=parts.batches(3)).run()
    assert sorted(ship.used) == ["after_train_iter"] * 3 + ["on_exception"]
    assert ship.closed == [("before_train_epoch", 4), ("before_run", 4)]
    bus, release = Bus(ship := Ship(), abort_timeout=0.05), threading.Event()
    ship.use = lambda event: release.wait()
    bus.on("after_train_iter", fails(Boom), priority=95)
    with capture_logs() as logs, pytest.raises(Boom):
        parts.loop(bus).run()
    release.set()
    assert ship.closed == [("before_train_epoch", 0), ("before_run", 0)]
    assert [log["handler"] for log in logs if "abort_timeout" in log["event"]] == ["Ship", "Ship"]


def test_after_an_exception_what_was_deferred_comes_behind_the_events_of_saves_in_flight(parts, bus, tmp_path):
    told, failed = [], threading.Event()

    def fails(event):
        event.run.checkpoints.save()
        event.run.defer(lambda: told.append("deferred"))

    @bus.on("checkpoint_committed")
    def slow_disk(event):
        assert failed.wait(30)
        time.sleep(0.1)
        told.append("committed")

    bus.on("before_train", fails)
    bus.on("before_train_iter", lambda event: 1 / 0 if event.progress.iter else None)
    bus.on("on_exception", lambda event: failed.set())
    with pytest.raises(ZeroDivisionError):
        parts.loop(bus=bus, work_dir=tmp_path).run()
    assert told == ["committed", "deferred"]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("at", ["waiting", "undo"])
def test_ctrl_c_while_a_deferred_function_waits_for_lanes_does_not_cost_the_function(parts, bus, at):
    started, release, calls = threading.Event(), threading.Event(), []

    class Slow(Hook):
        def before_run(self, event):
            event.run.defer(self.undo)

        def undo(self):
            calls.append("undo")
            if at == "undo" and len(calls) == 1:
                raise KeyboardInterrupt

        @mount(offload="thread")
        def after_train_iter(self, event):
            started.set()
            release.wait()

    def strike():
        started.wait()
        until(lambda: bus.internal.progress is not None and "Mark.synchronize" in stack_of(threading.main_thread()))
        signal.raise_signal(signal.SIGINT) if at == "waiting" else release.set()
        if at == "waiting":
            until(lambda: calls)
            release.set()

    bus.add(Slow())
    bus.abort_timeout = 0.5
    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(KeyboardInterrupt):
        parts.loop(bus, train_data=parts.batches(1), max_epochs=1).run()
    striker.join()
    assert calls == ["undo"] * (1 if at == "waiting" else 2)


def test_cancel_ends_the_wait_of_an_inline_after_run(parts, bus):
    started, release = threading.Event(), threading.Event()

    class Slow(Hook):
        ended = False

        @mount(offload="thread")
        def after_train_iter(self, event):
            started.set()
            release.wait()

        def after_run(self, event):
            self.ended = True

    def cancel():
        until(lambda: started.is_set() and "Mark.synchronize" in stack_of(threading.main_thread()))
        run.cancel()
        until(lambda: bus.internal.progress is None)
        release.set()

    bus.add(slow := Slow())
    canceller = threading.Thread(target=cancel)
    with pytest.raises(RunCancelled), Run(bus, model=parts.model()) as run:
        canceller.start()
        parts.train(run, parts.batches(1))
    canceller.join()
    assert not slow.ended


def test_a_function_of_a_program_is_deferred_as_it_is(parts, bus):
    release, undone = threading.Event(), []
    bus.on("after_train_iter", lambda event: release.wait(), offload="thread")
    bus.add(Ship())
    bus.on("before_train_epoch", lambda event: event.run.defer(lambda: undone.append(event)))
    bus.on("after_train", lambda event: release.set())
    parts.loop(bus, max_epochs=1).run()
    assert undone


def test_defer_needs_an_open_run_and_a_function(parts):
    run = Run(model=parts.model())
    with pytest.raises(RuntimeError):
        run.defer(print)
    with pytest.raises(TypeError, match=r"run.defer\(f\)"), run:
        run.defer([].clear())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_failing_offloaded_handler_ends_the_run_with_its_exception(parts, backend):
    bus = Bus(backend=backend)
    trace = parts.Trace(bus)
    error = Boom("offloaded")

    @bus.on("after_train_iter", linger=0)
    async def ship(event):
        raise error

    with pytest.raises(Boom) as caught:
        parts.loop(bus, max_epochs=1000).run()
    assert caught.value is error
    assert trace.names[-1] == "on_exception"
    assert any("offloaded (async) handler" in note for note in error.__notes__)


def test_a_failure_of_an_offloaded_handler_at_the_very_end_is_raised_by_run(parts, bus):
    bus.on("after_run", fails(Boom("late")), offload="thread")
    with pytest.raises(Boom, match="late"):
        parts.loop(bus).run()
    assert bus.state == "idle"


def test_the_users_exception_wins_over_one_of_an_offloaded_handler_and_is_published(parts, bus, trace):
    bus.on("before_forward", fails(ValueError("offloaded")), offload="thread", capture=lambda e: None)

    def step(model, batch):
        until(lambda: bus.internal.failures)
        raise Boom("mine")

    with pytest.raises(Boom, match="mine") as caught:
        parts.loop(bus, step=step, sanity=0).run()
    assert trace.names[-1] == "on_exception"
    assert any("offloaded" in note for note in caught.value.__notes__)
    assert bus.state == "idle"


def test_an_exception_leaves_autocast_and_the_optimizer_alone_and_the_loop_can_run_again(parts, bus, trace):
    bus.add(Update(amp="bf16"))
    loop = parts.loop(bus, step=fails_with(parts, [Boom()]), max_epochs=1, sanity=0)
    with pytest.raises(Boom):
        loop.run()
    assert not torch.is_autocast_enabled("cpu")
    steps = []
    with bus.on("after_optimizer_step", steps.append):
        loop._optimizer.step()
    assert steps == []
    trace.events.clear()
    loop.run()
    assert trace.names[-2:] == ["after_train", "after_run"]
    assert len(trace.of("after_train_iter")) == 3


def test_a_stopped_loop_continues_with_the_next_run_which_a_failed_val_does_not_affect(parts, bus, trace):
    stop_at(bus, "after_val", once=1)
    errors = []
    loop = parts.loop(bus, val_step=fails_with(parts, errors))
    loop.run()
    errors.append(Boom())
    with pytest.raises(Boom):
        loop.validate()
    trace.events.clear()
    loop.run()
    assert trace.names[:4] == ["before_run", "before_train", "before_train_epoch", "before_train_iter"]
    assert [e.progress.epoch for e in trace.of("before_train_epoch")] == [1]


# -------------------------------------------------------------------------------------------------------------- stop


def stop_at(bus, mount_point, **filters):
    bus.on(mount_point, lambda e: e.run.stop("enough"), **filters)


@pytest.mark.parametrize("mount_point", ["before_forward", "before_backward", "after_optimizer_step"])
def test_a_stop_inside_an_iteration_waits_for_its_end(parts, bus, trace, mount_point):
    """The iteration ends, the epoch does not."""
    stop_at(bus, mount_point, once=2)
    assert parts.loop(bus).run() == {}
    expected = parts.spell("2*(before_train_iter after_train_iter) after_train after_run")
    assert trace.names[-len(expected) :] == expected


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("val", "before_train before_train_epoch 2*(before_train_iter after_train_iter) before_val before_val_epoch"),
        ("test", "before_test before_test_epoch"),
    ],
)
def test_a_stop_in_an_evaluation_publishes_nothing_but_the_end_of_its_iteration(parts, bus, trace, stage, names):
    """Also in one inside the long epoch of a run by iterations."""
    stop_at(bus, f"before_{stage}_iter")
    loop = parts.loop(bus, max_iters=6, val_interval=2, test_data=parts.batches(2))
    loop.run() if stage == "val" else loop.test()
    ended = "after_train after_run" if stage == "val" else "after_run"
    assert trace.names == parts.spell(f"before_run {names} before_{stage}_iter after_{stage}_iter {ended}")


def test_a_stop_inside_a_window_that_the_epoch_cuts_short_waits_for_that_step(parts, bus, trace):
    bus.add(Update(accumulate=4))
    stop_at(bus, "after_train_iter", once=5)
    parts.loop(bus, train_data=parts.batches(6)).run()
    assert len(trace.of("after_train_iter")) == 6
    assert trace.of("after_run")[0].progress.update == 2


def test_stop_from_another_thread(parts, bus, trace):
    loop = parts.loop(bus, max_epochs=1000)
    bus.on("before_forward", lambda e: on_threads(loop.stop, "from outside"), once=2)
    loop.run()
    assert len(trace.of("after_train_iter")) == 2
    assert trace.names[-2:] == ["after_train", "after_run"]


def test_stop_and_save_hold_no_lock_that_a_signal_handler_would_wait_for(parts, bus, tmp_path):
    """A signal handler runs on the training thread between any two of its instructions, the run's own included."""
    files = {module.__file__ for module in (run_module, saves_module, state_module, threading)}

    def interrupted(frame, kind, argument):
        if frame.f_code.co_filename not in files:
            return None
        if kind == "line":
            sys.settrace(None)  # as long as the handler runs
            run.stop()
            run.checkpoints.save()
            sys.settrace(interrupted)
        return interrupted

    with parts.loop(bus, work_dir=tmp_path)._new_run() as run:
        run.drive().begin_train()
        before = sys.gettrace()
        sys.settrace(interrupted)
        try:
            run.stop()
            run.checkpoints.save()
            run.checkpointer.save_if_asked()
        finally:
            sys.settrace(before)
    assert (tmp_path / "iter_0.safetensors").exists()
