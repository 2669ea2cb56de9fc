"""The order of a run: random calls and loops, and what is asked of them, against a model in plain Python.

Calls (push) and ``for`` statements (pull) are steps of state machines of hypothesis, which shortens what fails.
"""

import ast
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec.structs import astuple
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, ConfigurationError, Event, Run, RunPreempted, TrainingError, TrainLoop, mount_points
from trainbus.eventloop.errors import RunCancelled, RunStopped
from trainbus.eventloop.events.event import resolve
from trainbus.eventloop.training import Scope, machine
from trainbus.eventloop.training.machine import TURNS

from .machine_model import CALLS, Boom, Cancelled, Evaluation, Loops, Model, Preempted, Refused, Stopped, Train, in_turn, struck

WRITERS = ("checkpoint_staged", "checkpoint_committed")
"""Events of the thread that writes files."""

ERRORS = {Boom: Boom, Cancelled: RunCancelled, Stopped: RunStopped, Preempted: RunPreempted}

COUNTS = ("epoch", "iter", "update", "batches", "validations", "tests", "phase")

ACTS: dict[str, Callable[[Any], object]] = {
    "stop": lambda run: run.stop(),
    "stop with a reason": lambda run: run.stop("enough"),
    "preempt": lambda run: run.stop("shutdown", exit_code=75),
    "cancel": lambda run: run.cancel(),
    "pause": lambda run: run.pause(),
    "set a rate": lambda run: run.set_lr(0.5),
    "set another rate": lambda run: run.set_lr(0.25),
    "save": lambda run: run.save(),
    "save by name": lambda run: run.save("a.safetensors"),
    "save by another name": lambda run: run.save("b.safetensors"),
}


OFTEN = [*ACTS, *[act for act in ACTS if act not in ("stop", "stop with a reason", "preempt", "cancel")] * 8]

LIMITS: list[Any] = [None, {"max_epochs": 1}, {"max_epochs": 3}, {"max_iters": 4}]


def fail(run: Any) -> None:
    raise Boom


def by_signal(act: Callable[[], object]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: act())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def by_thread(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


WHO = {"code": lambda act: act(), "thread": by_thread, "signal": by_signal}


def asked(act: str, who: str) -> Callable[[Any], object]:
    """Return what asks a run for something; for a save by name the training thread must."""
    return lambda run: WHO["code" if "name" in act else who](lambda: ACTS[act](run))


class Real:
    """A run, with the methods of the model; and what its bus publishes, as the model tells it."""

    def __init__(self, folder: str | None) -> None:
        self.heard: list[Any] = []
        self.files: list[Any] = []
        self.armed: list[Callable[[Any], object]] = []
        self.strikes: list[Any] = []
        model = torch.nn.Linear(1, 1)
        model.register_buffer("calls", torch.zeros(1))
        self.weight, self.calls = model.weight, model.calls
        self.weight.grad = torch.ones(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.bus = Bus()
        self.run = Run(self.bus, model=model, optimizer=optimizer, work_dir=folder)
        self.bus.on(Event, self.hear, priority=0)
        self.bus.on(Event, self.act, priority=90)
        self.bus.on("run_paused", lambda event: self.run.unpause(), priority=95)
        self.step, self.save = optimizer.step, self.run.checkpoints.save
        self.use(self.run)

    def use(self, run: Run) -> None:
        self.run = run
        self.stop, self.cancel, self.pause, self.set_lr = run.stop, run.cancel, run.pause, run.set_lr

    def hear(self, event: Any) -> None:
        name, at = event.mount_point, astuple(event.progress)[:-1]
        facts: dict[str, Callable[[], list[Any]]] = {
            "before_save_checkpoint": lambda: [Path(event.path).name],
            "checkpoint_skipped": lambda: [Path(event.path).name],
            "learning_rate_set": lambda: [event.lr],
            "after_run": lambda: [event.stopped, event.reason],
        }
        if name == "checkpoint_committed":
            self.files += [(Path(path).name, at) for path in event.names]
        elif name not in WRITERS:
            self.heard.append((name, at, *facts.get(name, list)()))

    def act(self, event: Any) -> None:
        if event.mount_point not in (*WRITERS, "before_save_checkpoint"):
            armed, self.armed = self.armed + struck(self, event.mount_point), []
            for act in armed:
                act(self)

    def defer(self, label: str) -> None:
        self.run.defer(lambda: self.heard.append((label,)))

    def change(self) -> None:
        with torch.no_grad():
            self.weight.add_(torch.pi / 1000)  # which no number of steps undoes

    @property
    def scope(self) -> Scope:
        return self.run.state.machine.innermost

    def stands(self) -> tuple[Any, ...]:
        scope = self.scope.name.lower().replace("closed", "")
        counts = tuple(getattr(self.run.counters, name) for name in COUNTS)
        return re.sub("val|test", "evaluation", scope), astuple(self.run.progress)[:-1], counts


class Sides(RuleBasedStateMachine):
    """The same is done to a run and to the model.

    All is one rule, as rules of which each is seldom in turn would give short runs.
    """

    real: Any
    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.ends = ExitStack()
        self.ends.enter_context(capture_logs())
        patch = self.ends.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "fsync", lambda descriptor: None)  # to wait for the disk takes most of the time
        self.labels = 0
        self.errors: list[BaseException] = []
        self.agree = True

    def folder(self, saves: bool) -> str | None:
        return self.ends.enter_context(TemporaryDirectory()) if saves else None

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        self.new(data)

    @rule(data=st.data())
    def turn(self, data: Any) -> None:
        getattr(self, data.draw(st.sampled_from(self.turns())))(data)

    def both(self, do: Callable[[Any], object]) -> Any:
        """Do something to both: they do the same, or raise the same; return what the model returns or raises."""
        self.agree = False
        self.real.calls += 1  # else a save only adds a name to the last file
        before = len(self.real.heard), self.real.stands()
        expected, found = (self.outcome(do, one) for one in (self.model, self.real))
        if isinstance(expected, Refused):
            assert isinstance(found, TrainingError | ConfigurationError | RuntimeError), found
            told = re.findall(r"drive\.(\w+)\(\)", str(found).partition("; expected ")[2])
            assert not expected.args or set(told) == expected.args[0]
            assert not expected.args or (len(self.real.heard), self.real.stands()) == before
        elif isinstance(expected, Exception):
            assert type(found) is ERRORS[type(expected)], found
            assert not isinstance(found, RunPreempted) or found.code == 75
        else:
            assert not isinstance(found, BaseException), found
            assert not isinstance(expected, bool) or found is expected
        if isinstance(expected, Exception):
            self.failed(expected, found)
        assert self.real.heard == self.model.heard
        assert self.real.stands() == self.model.stands()
        if not self.model.scopes:
            assert self.real.bus.state == "idle"
            assert self.real.run.model.training
            assert torch.is_grad_enabled()
            assert self.real.files == self.model.files
        self.agree = True
        return expected

    def outcome(self, do: Callable[[Any], object], one: Any) -> Any:
        try:
            return do(one)
        except (Refused, TrainingError, ConfigurationError, RuntimeError, *ERRORS, *ERRORS.values()) as error:
            self.errors.append(error)
            return error

    def step(self, data: Any) -> None:
        self.both(lambda one: one.step() and None)

    def ask(self, data: Any) -> None:
        self.both(asked(data.draw(st.sampled_from(OFTEN)), data.draw(st.sampled_from([*WHO]))))

    def ask_in_a_handler(self, data: Any) -> None:
        act, who = data.draw(st.sampled_from([*OFTEN, *["fail"] * 3])), data.draw(st.sampled_from([*WHO]))
        if self.model.saves or not act.startswith("save"):
            for one in (self.model, self.real):
                one.armed.append(fail if act == "fail" else asked(act, who))

    def defer(self, data: Any) -> None:
        self.labels += 1
        self.both(lambda one: one.defer(f"undo {self.labels}"))

    def teardown(self) -> None:
        with self.ends:
            if self.agree and self.model.scopes:
                self.end()


class Pushed(Real):
    def __init__(self, folder: str | None) -> None:
        super().__init__(folder)
        self.drive = self.run.drive()

    @property
    def scope(self) -> Scope:
        return self.drive.scope

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drive, name)


class Calls(Sides):
    """Calls of ``run.drive()``, in turn and out of turn, and requests between and in them."""

    def new(self, data: Any) -> None:
        saves = data.draw(st.booleans())
        self.model, self.real = Model(saves=saves), Pushed(self.folder(saves))
        self.ends.callback(self.close)

    def close(self) -> None:
        with suppress(TrainingError):
            self.real.fail(Boom())

    def end(self) -> None:
        self.both(lambda one: one.fail(Boom()))

    def failed(self, expected: Exception, found: Any) -> None:
        if self.model.scopes and not isinstance(expected, Refused):
            self.model.fail(expected)
            self.real.fail(found)

    def turns(self) -> list[str]:
        if not self.model.scopes:
            return ["go_on"] * 3 + ["any_call", "ask", "ask_in_a_handler", "defer"] + ["new"] * bool(self.model.heard)
        few = ["call_in_turn"] * 3 + ["any_call", "ask_for_a_stop", "defer"]
        return ["go_on"] * 8 + ["step", "ask", "ask_in_a_handler"] * 2 + few

    def go_on(self, data: Any) -> None:
        """As the loop of a training goes on, which fewer calls end."""
        calls = [call for call in CALLS if in_turn(call, self.model.scope) and call.startswith(("begin", "end_it", "end_ev"))]
        self.make(data.draw(st.sampled_from(calls)), data)

    def call_in_turn(self, data: Any) -> None:
        self.make(data.draw(st.sampled_from([call for call in CALLS if in_turn(call, self.model.scope)])), data)

    def any_call(self, data: Any) -> None:
        self.make(data.draw(st.sampled_from([*CALLS, "fail"])), data)

    def make(self, call: str, data: Any) -> None:
        arguments: dict[str, Any] = {}
        if call == "begin_evaluation":
            arguments = {"stage": data.draw(st.sampled_from(("val", "test")))}
        elif call == "fail":
            arguments = {"error": Boom()}
        elif call == "begin_train":
            arguments = data.draw(st.sampled_from([{}, {"max_epochs": 2}, {"max_iters": 3}]))
        self.both(lambda one: getattr(one, call)(**arguments))

    def ask_for_a_stop(self, data: Any) -> None:
        self.both(lambda one: one.should_stop())


class Statement:
    """A ``for`` statement over an iterator of a run, and what the model has for it."""

    def __init__(self, run: Run, one: Train | Evaluation, most: int | None) -> None:
        self.one, self.most = one, most
        if isinstance(one, Train):
            self.batches: Any = run.train(range(one.length), accumulate=one.accumulate)
        else:
            self.batches = (run.validate if one.stage == "val" else run.test)(range(one.length))
        self.iterator: Any = None

    @property
    def trains(self) -> bool:
        return isinstance(self.one, Train)

    def begin(self, one: Any) -> None:
        if isinstance(one, Pulled):
            self.iterator = islice(iter(self.batches), self.most)
        elif self.trains:
            one.iterate(self.one)

    def next(self, one: Any) -> bool:
        if isinstance(one, Pulled):
            return next(self.iterator, None) is not None
        if self.most is not None:
            self.most -= 1
            if self.most < 0:
                self.leave(one)
                return False
        return one.next_batch(self.one) if self.trains else one.next_evaluated(self.one)

    def leave(self, one: Any) -> None:
        if isinstance(one, Pulled):
            self.iterator = None
        elif isinstance(self.one, Train):
            self.one.left = True
        else:
            one.leave_evaluation(self.one)


class Pulled(Real):
    def epochs(self, **limit: Any) -> None:
        self.turns = self.run.epochs(**limit)

    def next_epoch(self) -> bool:
        return next(self.turns, None) is not None

    def exit(self, error: BaseException | None = None) -> None:
        self.run.__exit__(error and type(error), error, None)


class Pulls(Sides):
    """``for`` statements over epochs, batches, validations and tests, turn by turn; and requests in them."""

    def new(self, data: Any) -> None:
        saves, limit = data.draw(st.sampled_from((True, True, False))), data.draw(st.sampled_from(LIMITS))
        self.model, self.real = Loops(saves=saves), Pulled(self.folder(saves))
        self.statements: list[Statement] = []
        self.broken: Statement | None = None
        self.limited, self.in_body = limit is not None, limit is None
        self.both(lambda one: (one.run.__enter__() if one is self.real else one.begin_run()) and None)
        self.ends.callback(self.real.exit, Boom())
        if self.limited:
            self.both(lambda one: one.epochs(**limit))

    def end(self) -> None:
        self.both(lambda one: one.exit(Boom()))

    def failed(self, expected: Exception, found: Any) -> None:
        """The exception leaves the block of the run, and then the loops: it holds their frames."""
        if type(expected) is Refused:
            return
        if self.model.scopes:
            self.both(lambda one: one.exit(expected if one is self.model else found))
        while self.statements:
            self.statements.pop().iterator = None

    def turns(self) -> list[str]:
        """Loops within loops: the innermost statement goes on or is left, or another one begins in its body."""
        if not self.model.scopes:
            return ["new"]
        turns = ["step", "ask", "ask_in_a_handler"] * 2 + ["defer", "change"]
        live = self.statements[-1] if self.statements else None
        if live is not None:
            turns += ["next"] * 6 + ["leave"] * 2
        elif self.limited:
            turns += ["next_epoch"] * (4 if self.broken or not self.in_body else 1)
        if live is None or live.trains:
            turns += ["evaluate"] * 2
        if live is None and self.in_body:
            turns += ["train"] * 5 + ["train_on"] * 3 * bool(self.broken)
        return turns + (["train"] if live and live.trains else ["leave_run"] if live is None else [])

    def next_epoch(self, data: Any) -> None:
        self.broken = None
        self.in_body = self.both(lambda one: one.next_epoch()) is True

    def train(self, data: Any) -> None:
        one = Train(data.draw(st.integers(1, 4)), data.draw(st.sampled_from((1, 1, 2, 3))))
        self.enter(Statement(self.real.run, one, data.draw(st.none() | st.integers(1, 3))))

    def evaluate(self, data: Any) -> None:
        one = Evaluation(data.draw(st.sampled_from(("val", "val", "test"))), data.draw(st.integers(1, 3)))
        self.enter(Statement(self.real.run, one, data.draw(st.none() | st.integers(1, 2))))

    def train_on(self, data: Any) -> None:
        """Another statement over the batches of one that was left."""
        assert self.broken is not None
        self.broken.most = None
        self.enter(self.broken)

    def enter(self, statement: Statement) -> None:
        self.statements.append(statement)
        self.both(statement.begin)
        if statement in self.statements:
            self.next()

    def next(self, data: Any = None) -> None:
        statement = self.statements[-1]
        if self.both(statement.next) is False:
            self.forget(statement)

    def leave(self, data: Any) -> None:
        statement = self.statements[-1]
        self.both(statement.leave)
        self.forget(statement)

    def forget(self, statement: Statement) -> None:
        if statement in self.statements:
            self.statements.remove(statement)
        if statement.trains:
            self.broken = statement

    def change(self, data: Any) -> None:
        self.both(lambda one: one.change())

    def leave_run(self, data: Any) -> None:
        error = Boom() if data.draw(st.booleans()) else None
        self.both(lambda one: one.exit(error))


# ------------------------------------------------------------------------------------------------- the ways of one training

EPOCHS, BATCHES, EVALUATED, ITERS, EVERY = 2, 3, 2, 5, 2


def by_calls(one: Any, by_iter: bool) -> None:
    """The training of a ``TrainLoop``, by calls of a driver or of the model."""
    one.begin_run()
    if not one.should_stop():
        one.begin_train(**({"max_iters": ITERS} if by_iter else {"max_epochs": EPOCHS}))
        for _ in range(1 if by_iter else EPOCHS):
            if one.should_stop() or not epoch_by_calls(one, by_iter):
                break
        one.end_train()
    one.end_run()


def epoch_by_calls(one: Any, by_iter: bool) -> bool:
    one.begin_epoch()
    for done in range(1, 1 + (ITERS if by_iter else BATCHES)):
        if one.should_stop():
            one.abandon_epoch()
            return False
        one.begin_iteration()
        one.step()
        one.end_iteration()
        if by_iter and (done % EVERY == 0 or done == ITERS) and not one.should_stop():
            evaluate_by_calls(one)
    one.end_epoch()
    if not by_iter and not one.should_stop():
        evaluate_by_calls(one)
    return True


def evaluate_by_calls(one: Any) -> None:
    one.begin_evaluation("val")
    for _ in range(EVALUATED):
        if one.should_stop():
            break
        one.begin_evaluation_iteration()
        one.end_evaluation_iteration()
    if one.should_stop():
        one.abandon_evaluation()
    else:
        one.end_evaluation()


def by_statements(real: Real, by_iter: bool) -> None:
    with real.run as run:
        for _ in run.epochs(EPOCHS):
            for _ in run.train(range(BATCHES)):
                real.step()
            for _ in run.validate(range(EVALUATED)):
                pass


def by_loop(real: Real, by_iter: bool) -> None:
    limit = {"max_iters": ITERS, "val_interval": EVERY} if by_iter else {"max_epochs": EPOCHS}
    model, data = real.run.model, {"train_data": range(BATCHES), "val_data": range(EVALUATED)}
    learn = lambda model, batch: model(torch.ones(1)).sum()  # noqa: E731
    real.bus.on("before_run", lambda event: real.use(event.run), priority=1)
    optimizer = real.run.optimizers["optimizer"]
    TrainLoop(model, optimizer, step=learn, val_step=lambda model, batch: {}, bus=real.bus, sanity=0, **data, **limit).run()


COMMON = [f"{when}_{what}" for what in ("run", "train", "train_epoch", "train_iter") for when in ("before", "after")]
COMMON += [f"{when}_{what}" for what in ("val", "val_epoch", "val_iter") for when in ("before", "after")]
ANYWHERE = [act for act in [*ACTS, "fail"] if not act.startswith("save")]  # each way has its own places of saves
STRIKES = st.lists(st.tuples(st.sampled_from(COMMON), st.integers(1, 4), st.sampled_from(ANYWHERE), st.sampled_from([*WHO])))


def outcome(way: Any, one: Any, strikes: Any, by_iter: bool) -> Any:
    """Return what is heard of a training in which something is done at the n-th event of a mount point, and how it ends."""
    one.strikes = [(name, count, fail if act == "fail" else asked(act, who)) for name, count, act, who in strikes]
    ended: Any = None
    try:
        way(one, by_iter)
    except (*ERRORS, *ERRORS.values()) as error:
        ended = error
        if way is by_calls and not isinstance(error, RunPreempted | Preempted):
            with suppress(Refused, TrainingError):
                one.fail(error)
    also = ("on_exception", "run_paused", "run_resumed", "learning_rate_set")
    # without the limits, which a TrainLoop knows before its training begins
    heard = [(name, at[:5], at[-1], *facts) for name, at, *facts in one.heard if name in (*COMMON, *also)]
    return heard, None if isinstance(ended, RunStopped | None) else ERRORS.get(type(ended), type(ended))


@pytest.mark.long
@settings(derandomize=True, database=None)
@example([("before_train", 1, "stop", "code")], False)
@given(STRIKES, st.booleans())
def test_calls_statements_and_a_loop_train_as_the_model_says(strikes, by_iter):
    with capture_logs():
        heard, ended = outcome(by_calls, Model(saves=False), strikes, by_iter)
        for way, kind in ((by_calls, Pushed), (by_statements, Pulled), (by_loop, Pulled))[:: 2 if by_iter else 1]:
            real = kind(None)
            assert outcome(way, real, strikes, by_iter) == (heard, ended), way
            assert real.bus.state == "idle"


SETTINGS = settings(derandomize=True, database=None, stateful_step_count=50, phases=[Phase.generate, Phase.shrink])

TestCalls = Calls.TestCase
TestPulls = Pulls.TestCase
TestCalls.settings = TestPulls.settings = settings(SETTINGS, max_examples=75)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Calls, Pulls])
def test_more_of_them(kind):
    run_state_machine_as_test(kind, settings=settings(SETTINGS, max_examples=900))


# ------------------------------------------------------------------------------------------------------------- the table

INSIDE = {
    "optimizer_step",
    "module_forward",
    "module_backward",
    "forward",
    "backward",
    "save_checkpoint",
    "load_checkpoint",
    "checkpoint",
}
"""Other things than scopes that events come before and behind."""


def test_every_event_around_a_scope_is_in_the_table():
    names = {name for name in mount_points() if name.startswith(("before_", "after_"))}
    around = {resolve(name) for name in names if name.partition("_")[2] not in INSIDE}
    assert around == {event for turn in TURNS.values() for event in turn.events}


def test_the_table_needs_neither_torch_nor_a_bus():
    nodes = ast.walk(ast.parse(Path(machine.__file__).read_text()))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {name.removeprefix("trainbus.").removeprefix("eventloop.") for name in modules if name.startswith("trainbus")}
    assert ours == {"eventloop", "errors", "events", "log", "training.schema"}
    assert not {name for name in modules if name.startswith("torch")}


@pytest.mark.parametrize("scope", [one for one in Scope if one is not Scope.AROUND])
def test_each_scope_can_be_left(scope):
    """By calls of the table, a run comes from any scope to its end."""
    seen, front = set(), {scope}
    while front:
        seen |= front
        after = {turn.to for (here, _), turn in TURNS.items() if here in front}
        front = (after | ({Scope.RUN} if Scope.AROUND in after else set())) - seen
    assert Scope.CLOSED in seen
