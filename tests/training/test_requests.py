"""What other threads and signal handlers ask of a run: to pause, to go on, to end, to train at another learning rate."""

import _thread
import math
import re
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import Any

import anyio
import pytest
import torch
from torch.optim import lr_scheduler as schedules

from trainbus.eventloop import Bus, ConfigurationError, Hook, Run, TrainingError
from trainbus.eventloop.errors import RunCancelled
from trainbus.hooks import CheckpointHook, ParamSchedulerHook

from ..waiting import until


@contextmanager
def released(release: Any) -> Any:
    """Call it after a while, so that a failure does not hang."""
    deadline = threading.Timer(5, release)
    deadline.start()
    try:
        yield
        assert deadline.is_alive()
    finally:
        deadline.cancel()


class Stalled:
    """A loop that pauses at the second event of a mount point, and a thread that acts on it once it has stood still."""

    def __init__(self, parts: Any, act: Any, *, at: str = "after_train_iter", pause: Any = Run.pause, **options: Any) -> None:
        self.bus = Bus()
        self.trace = parts.Trace(self.bus)
        self.loop = parts.loop(self.bus, max_epochs=2, **options)
        self.still: list[bool] = []
        parts.act_at(self.bus, at, 2, lambda event: self.stand(event.run), priority=100)
        self.act, self.pause = act, pause

    def stand(self, run: Run) -> None:
        self.pause(run)
        threading.Thread(target=self.look, args=(run,)).start()

    def look(self, run: Run) -> None:
        until(lambda: self.trace.of("run_paused"))
        before = len(self.trace.events)
        time.sleep(0.1)
        self.still[:] = [len(self.trace.events) == before]
        self.act(run)


@pytest.mark.parametrize(
    ("at", "end"),
    [
        ("before_train_iter", ("after_train_iter", 1)),  # of the iteration
        ("after_train_epoch", None),
    ],
)
def test_a_paused_run_says_so_and_waits_until_resumed_with_equal_results(parts, at, end, logs):
    stalled = Stalled(parts, lambda run: run.unpause(), at=at)
    stalled.loop.run()
    assert stalled.still == [True]
    assert [entry["event"] for entry in logs].count("the run is paused") == 1
    whole = parts.loop(max_epochs=2)
    trace = parts.Trace(whole.bus)
    whole.run()
    names = stalled.trace.names
    assert [name for name in names if name not in ("run_paused", "run_resumed")] == trace.names
    paused = names.index("run_paused")
    assert names[paused + 1] == "run_resumed"
    assert names[paused - 1] == (at if end is None else end[0])
    (begun,), (ended,) = stalled.trace.of("run_paused"), stalled.trace.of("run_resumed")
    assert begun.progress.iter == ended.progress.iter
    parts.assert_same(stalled.loop.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize(
    ("stops", "advice"),
    [
        ([{}], 'continue from .*iter_2.* with resume="auto"'),
        ([{"reason": "enough"}], 'continue from .*iter_2.* with resume="auto"'),
        ([{"instead": "give more"}], "resumed as it is, it would stop again: give more"),
        ([{"instead": "give more"}, {"reason": "enough"}], "resumed as it is, it would stop again: give more"),
        ([{}, {"instead": "give more"}], "resumed as it is, it would stop again: give more"),
    ],
)
def test_the_log_advises_to_resume_a_stopped_run_only_if_it_would_go_on(parts, bus, tmp_path, stops, advice, logs):
    bus.add(CheckpointHook(1, by_epoch=False))
    bus.on("after_train_iter", lambda event: [event.run.stop(**stop) for stop in stops], once=2)
    parts.loop(bus, work_dir=tmp_path).run()
    assert re.fullmatch(f"the run was stopped; {advice}", logs[-1]["event"])


REQUESTS = {"stop": (), "pause": (), "unpause": (), "set_lr": (0.5,), "save": ()}


@pytest.mark.parametrize(("how", "arguments"), REQUESTS.items())
def test_a_request_to_a_loop_that_is_not_running_is_an_error_that_names_it(parts, tmp_path, how, arguments):
    loop = parts.loop(work_dir=tmp_path)
    for _ in range(2):  # before the run, and after it
        with pytest.raises(TrainingError, match=rf"loop\.{how}\(\)"):
            getattr(loop, how)(*arguments)
        loop.run()
    assert loop.counters.iter == 6


def test_a_stop_holds_from_the_beginning_of_the_call_on(parts, bus):
    """Also while the run of this call is made."""

    class Stops(Hook):
        def default_checkpoint_dir(self):
            loop.stop("enough")

        def before_train(self, event):
            pytest.fail("the run has begun")

    loop = parts.loop(bus)
    bus.add(Stops())
    loop.run()
    assert loop.counters.iter == 0


def test_a_stop_as_a_run_begins_ends_it_then(parts, bus, trace):
    loop = parts.loop(bus)
    cancel = bus.on("before_run", lambda event: event.run.stop("enough")).cancel
    assert loop.run() == {}
    assert trace.names == ["before_run", "after_run"]
    assert trace.events[-1].run.info["stop_reason"] == "enough"
    cancel()
    loop.run()
    assert loop.counters.iter == 6


@pytest.mark.parametrize("at", ["after_train_iter", "after_val_iter", "after_train_epoch"])
def test_a_paused_run_writes_the_checkpoint_that_it_is_asked_for(parts, tmp_path, at):
    """A run that resumes from it ends with the same weights."""

    def save(run: Run) -> None:
        run.checkpoints.save()
        until(lambda: stalled.trace.of("checkpoint_committed"))
        run.unpause()

    stalled = Stalled(parts, save, at=at, work_dir=tmp_path / "whole")
    stalled.loop.run()
    assert stalled.still == [True]
    names = stalled.trace.names
    assert names.index("run_paused") < names.index("checkpoint_committed") < names.index("run_resumed")
    resumed = parts.loop(max_epochs=2, work_dir=tmp_path / "resumed")
    resumed.run(resume=stalled.trace.of("checkpoint_committed")[0].path)
    parts.assert_same(resumed.model.state_dict(), stalled.loop.model.state_dict())


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda run: run.stop(), None),
        (lambda run: run.cancel(), RunCancelled),
        pytest.param(
            lambda run: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT),
            KeyboardInterrupt,
            marks=pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals go to no thread here"),
        ),
        (lambda run: _thread.interrupt_main(), KeyboardInterrupt),  # as consoles of editors do it, which wakes no lock
    ],
    ids=["stop", "cancel", "Ctrl-C", "interrupt_main"],
)
def test_a_paused_run_that_is_stopped_cancelled_or_interrupted_ends_without_another_iteration(parts, act, error):
    stalled = Stalled(parts, act)
    with released(lambda: stalled.loop.unpause()), pytest.raises(error) if error else nullcontext():
        stalled.loop.run()
    assert stalled.still == [True]
    assert len(stalled.trace.of("after_train_iter")) == 2
    names = stalled.trace.names
    assert names[-1] == "on_exception" if error else names[-2:] == ["after_train", "after_run"]
    assert stalled.bus.state == "idle"


def test_a_pause_ends_with_the_run(parts):
    """One that ended by an exception would stand still for ever when it is entered again."""
    run = Run(model=parts.model())
    with pytest.raises(ZeroDivisionError), run:
        run.pause()
        raise ZeroDivisionError
    with released(run.stop), run:
        trained = [batch for _ in run.epochs(1) for batch in run.train([1, 2])]
    assert trained == [1, 2]


def test_a_signal_handler_pauses_and_resumes(parts):
    act = {signal.SIGUSR1: "pause", signal.SIGUSR2: "unpause"}
    before = {number: signal.signal(number, lambda number, frame: getattr(stalled.loop, act[number])()) for number in act}
    resume = lambda run: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)  # noqa: E731
    stalled = Stalled(parts, resume, pause=lambda run: signal.raise_signal(signal.SIGUSR1))
    try:
        stalled.loop.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stalled.still == [True]
    assert stalled.trace.names[-1] == "after_run"


@pytest.mark.anyio
@pytest.mark.usefixtures("no_blocking")
@pytest.mark.parametrize("end", ["resumed", "cancelled"])
async def test_the_hosts_event_loop_runs_during_a_pause_and_resumes_or_cancels_the_run(parts, end):
    loop = parts.loop(max_epochs=2)
    trace = parts.Trace(loop.bus)
    loop.bus.on("after_train_iter", lambda event: event.run.pause(), once=2)
    ticks = 0
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(loop.arun)
            while len(trace.of("after_train_iter")) < 2:
                await anyio.sleep(0.001)
            for _ in range(50):
                await anyio.sleep(0.001)
                ticks += 1
            assert len(trace.of("before_train_iter")) == 2
            loop.unpause() if end == "resumed" else scope.cancel()
    assert ticks == 50
    assert scope.cancelled_caught == (end == "cancelled")
    assert len(trace.of("before_train_iter")) == (6 if end == "resumed" else 2)
    assert trace.names[-1] == ("after_run" if end == "resumed" else "on_exception")


# ---------------------------------------------------------------------------------------------------- learning rates


def rates(parts: Any, bus: Bus, set_at: Any, *, optimizer: Any = None, schedule: Any = None, **options: Any) -> list[float]:
    """The learning rate of each iteration, of 6 by default; set to 0.02 during the iteration ``set_at``."""
    model, seen = parts.model(), []
    made = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    if schedule is not None:
        bus.add(ParamSchedulerHook(schedule(made), by="iter"))
    bus.on("before_train_iter", lambda event: seen.append(float(made.param_groups[0]["lr"])))
    if set_at is not None:
        bus.on("before_forward", lambda event: event.run.set_lr(0.02), once=set_at)
    resume = options.pop("resume", None)
    parts.loop(bus, model=model, optimizer=made, val_data=None, **options).run(resume=resume)
    return seen


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_learning_rate_holds_from_the_next_iteration_on_and_the_bus_hears_of_it(parts, bus, kind):
    heard, kinds = [], set()
    bus.on("learning_rate_set", lambda event: heard.append((event.progress.iter, event.lr, event.optimizers)))
    bus.on("after_train_iter", lambda event: kinds.add(type(event.run.optimizers["optimizer"].param_groups[0]["lr"])))
    adam = lambda parameters, lr: torch.optim.Adam(parameters, lr=kind(lr))  # noqa: E731
    assert rates(parts, bus, 3, optimizer=adam) == pytest.approx([0.1] * 3 + [0.02] * 3)
    assert kinds == {type(kind(0.1))}
    assert heard == [(3, 0.02, ["optimizer"])]


def test_it_is_for_all_groups_of_all_optimizers_or_of_one_by_name_or_index(parts, bus):
    model = parts.model()
    parameters = list(model.parameters())
    optimizers = {
        "one": torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:3], "lr": 0.3}], lr=0.1),
        "other": torch.optim.SGD(parameters[3:], lr=0.1),
    }

    def now(run: Run) -> list[list[float]]:
        run.drive().should_stop()  # a safe mount point
        return [[group["lr"] for group in one.param_groups] for one in optimizers.values()]

    with Run(bus, model=model, optimizer=optimizers) as run:
        run.set_lr(0.5, "other")
        assert now(run) == [[0.1, 0.3], [0.5]]
        run.set_lr(0.6, 0)
        assert now(run) == [[0.6, 0.6], [0.5]]
        run.set_lr(0.7)
        assert now(run) == [[0.7, 0.7], [0.7]]
        told = {"third": "'one', 'other'", 2: "one of these names, or an index", 1.5: "optimizer=1.5: give a text"}
        for wrong, message in told.items():
            with pytest.raises(ConfigurationError, match=message):
                run.set_lr(0.1, wrong)
        assert now(run) == [[0.7, 0.7], [0.7]]


def test_what_cannot_be_is_an_error_of_the_call(parts):
    loop, told = parts.loop(), []

    @loop.bus.on("before_run")
    def ask(event):
        for rate in (0, -0.1, math.nan, math.inf, True, "0.1", None):
            for asked in (event.run, loop):
                with pytest.raises(ConfigurationError, match="lr="):
                    asked.set_lr(rate)
        with pytest.raises(ConfigurationError, match="work_dir="):
            loop.save()
        told.append(event)

    loop.run()
    assert told
    with pytest.raises(ConfigurationError, match="optimizer"):
        Run(model=loop.model).set_lr(0.1)


SCHEDULES = {
    "step": lambda optimizer: schedules.StepLR(optimizer, 2),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 8),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.5),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.3, total_steps=9),
    "sequential": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.LambdaLR(optimizer, lambda i: 0.8**i)], [3]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("set_at", [1, 3])
def test_a_schedule_continues_scaled_by_the_same_factor(parts, schedule, set_at):
    plain, changed = (rates(parts, Bus(), setting, schedule=schedule) for setting in (None, set_at))
    assert changed[:set_at] == plain[:set_at]
    # The schedule steps in the same iteration, and the rate is set after it.
    factor = 0.02 / plain[set_at]
    assert changed[set_at:] == pytest.approx([rate * factor for rate in plain[set_at:]])


def test_a_scaled_schedule_survives_a_resume(parts, tmp_path):
    options = {"schedule": SCHEDULES["lambda"], "work_dir": tmp_path, "resume": "auto"}
    first, rest = (rates(parts, Bus(CheckpointHook(1)), 2, max_epochs=epochs, **options) for epochs in (1, 2))
    assert first + rest == pytest.approx([0.1, 0.09, *(0.02 * 0.9**i for i in range(4))])
