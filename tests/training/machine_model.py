"""The order of a run in plain Python: which events come, with which counts, and where requests take effect.

It is written by the documentation (``Driver``, ``Run``, docs/internals/exactness.md), and knows nothing of the engine.
"""

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

INSIDE = {"run": ("",), "train": ("run",), "epoch": ("train",), "iteration": ("epoch",)}
INSIDE |= {"evaluation": ("run", "train", "epoch", "iteration"), "evaluation_iteration": ("evaluation",)}
"""What each scope may begin in."""

ABANDONED = {"iteration": ("iteration",), "epoch": ("epoch", "iteration")}
ABANDONED |= {"evaluation": ("evaluation", "evaluation_iteration")}
"""What may be abandoned, and where."""

CALLS = [*(f"begin_{name}" for name in INSIDE), *(f"end_{name}" for name in INSIDE), *(f"abandon_{name}" for name in ABANDONED)]


def in_turn(call: str, innermost: str) -> bool:
    verb, _, name = call.partition("_")
    if verb == "begin":
        return innermost in INSIDE[name]
    return innermost == name if verb == "end" else innermost in ABANDONED[name]


class Boom(Exception):  # noqa: N818 - short
    """A mistake of the user's code."""


class Refused(Exception):  # noqa: N818 - short
    """A call out of turn, with the calls that are in turn."""


class Mistake(Refused):
    """A loop that cannot go on."""


class Cancelled(Exception):  # noqa: N818 - short
    """The run was cancelled."""


class Stopped(Exception):  # noqa: N818 - short
    """A stop ends the run by an exception."""


class Preempted(Exception):  # noqa: N818 - short
    """The run has ended in order, and the process is to exit with a status."""


class At(NamedTuple):
    """The counts that an event carries."""

    epoch: int
    iter: int
    update: int
    batch_idx: int
    validation: int
    max_epochs: int | None
    max_iters: int | None
    stage: str = "train"


@dataclass
class Counts:
    epoch: int = 0
    iter: int = 0
    update: int = 0
    batches: int = 0
    validations: int = 0
    tests: int = 0
    phase: str = "train"


@dataclass
class Asked:
    """Requests that have not taken effect; a stop and a cancellation stay."""

    stop: bool = False
    reason: str = ""
    exit_code: int = 0
    cancelled: bool = False
    paused: bool = False
    rates: list[float] = field(default_factory=list)
    save: bool = False
    names: list[str] = field(default_factory=list)


def struck(one: Any, event: str) -> list[Callable[[Any], object]]:
    """Return what is to be done at this event, which is the n-th of its kind."""
    count = sum(heard[0] == event for heard in one.heard)
    return [act for name, number, act in one.strikes if (name, number) == (event, count)]


class Model:
    """What a run does at each call of its driver."""

    def __init__(self, *, saves: bool = True) -> None:
        self.saves = saves
        """True if the run has a directory."""
        self.heard: list[Any] = []
        self.files: list[tuple[str, At]] = []
        self.counts, self.asked = Counts(), Asked()
        self.max_epochs: int | None = None
        self.max_iters: int | None = None
        self.scopes: list[tuple[str, list[str]]] = []
        self.now = self.last = self.at()
        self.armed: list[Callable[[Any], object]] = []
        """What a handler does at the next event."""
        self.strikes: list[tuple[str, int, Callable[[Any], object]]] = []
        """What it does at the n-th event of a mount point."""
        self.steps = 0
        self.stage, self.index = "val", 0
        self.interrupted: At | None = None
        self.exit_code = 0
        self.asks = self.has_trained = self.saves_before_step = False

    # --------------------------------------------------------------------------------------------------- what it looks at

    @property
    def scope(self) -> str:
        return self.scopes[-1][0] if self.scopes else ""

    def has(self, scope: str) -> bool:
        return any(name == scope for name, _ in self.scopes)

    def at(self, stage: str = "train", index: int | None = None) -> At:
        counts = self.counts
        passes = counts.tests if stage == "test" else counts.validations
        index = counts.batches if index is None else index
        return At(counts.epoch, counts.iter, counts.update, index, passes, self.max_epochs, self.max_iters, stage)

    def stands(self) -> tuple[Any, ...]:
        return self.scope, self.now, astuple(self.counts)

    @property
    def save_waits(self) -> bool:
        """A save waits for the next call, but for one in the body of an iteration that has not stepped."""
        return self.interrupted is None or self.steps > 0

    @property
    def window_open(self) -> bool:
        """In an accumulation window, a stop and saves that need not be made now wait."""
        return False

    # ------------------------------------------------------------------------------------------------------------ requests

    def stop(self, reason: str = "", *, exit_code: int = 0) -> None:
        self.asked.reason = reason or self.asked.reason
        if not self.asked.stop:
            self.asked.exit_code = exit_code
        self.asked.stop = True

    def cancel(self) -> None:
        self.asked.cancelled = True

    def pause(self) -> None:
        self.asked.paused = True

    def set_lr(self, rate: float) -> None:
        self.asked.rates.append(rate)

    def save(self, name: str = "") -> None:
        if not self.saves or (name and not self.scopes):
            raise Refused
        if not name:
            self.asked.save = True
        elif self.has_trained or self.now.stage == "train":
            self.asked.names.append(name)
        else:
            self.skip([name])

    def defer(self, label: str) -> None:
        if not self.scopes:
            raise Refused
        self.scopes[-1][1].append(label)

    def should_stop(self) -> bool:
        self.asks = True
        self.handle()
        return self.asked.stop and not self.window_open

    def handle(self) -> None:
        """Requests take effect."""
        if self.asked.cancelled:
            raise Cancelled
        if self.asked.paused and not self.asked.stop:
            self.emit("run_paused", self.at(self.now.stage))
            self.asked.paused = False
            if self.asked.cancelled:
                raise Cancelled
            self.emit("run_resumed", self.at(self.now.stage))
        rates, self.asked.rates = self.asked.rates, []
        for rate in rates:
            self.emit("learning_rate_set", self.at(self.now.stage), rate)

    def save_point(self, *, force: bool = False) -> None:
        """What was asked for is saved here: requests with a name first; the name of the others has the count."""
        if self.has_trained and (self.asked.names or self.asked.save) and (force or not self.window_open):
            files = [*dict.fromkeys(self.asked.names), *[self.unnamed] * self.asked.save]
            self.asked.names, self.asked.save = [], False
            at = self.at(self.now.stage)
            self.emit("before_save_checkpoint", self.now, files[0])
            self.files += [(name, at) for name in files]

    @property
    def unnamed(self) -> str:
        return f"iter_{self.counts.iter}.safetensors"

    def skip(self, names: list[str]) -> None:
        """Only a training saves."""
        for name in names:
            self.emit("checkpoint_skipped", self.at(), name)

    def save_held(self, *, force: bool = True) -> None:
        """Save what has waited."""
        self.saves_before_step = False
        self.save_point(force=force)

    def call(self) -> None:
        """The code behind the last call has run: what it has asked for, or what waits, is saved."""
        self.save_held()

    # -------------------------------------------------------------------------------------------------------------- parts

    def emit(self, event: str, at: At | None = None, *facts: Any) -> None:
        self.heard.append((event, at or self.now, *facts))
        if event != "before_save_checkpoint":
            armed, self.armed = self.armed + struck(self, event), []
            for act in armed:
                act(self)

    def turn(self, call: str) -> None:
        if not in_turn(call, self.scope):
            raise Refused({one for one in CALLS if in_turn(one, self.scope)})

    def enter(self, scope: str) -> None:
        self.scopes.append((scope, []))

    def leave(self, scope: str) -> None:
        """End a scope and those inside it: what was deferred is called, the last first."""
        while self.has(scope):
            deferred = self.scopes[-1][1]
            while deferred:
                self.heard.append((deferred.pop(),))
            self.scopes.pop()

    def close(self) -> None:
        self.leave("run")
        self.asks, self.asked.paused = False, False
        self.interrupted = None

    def count_iteration(self) -> None:
        counts = self.counts
        counts.iter, counts.batches, counts.update = counts.iter + 1, counts.batches + 1, counts.update + self.steps
        counts.phase = "train"
        self.last = self.now

    # -------------------------------------------------------------------------------------------------------------- calls

    def begin_run(self) -> None:
        self.turn("begin_run")
        self.asked.names = []
        self.saves_before_step = False
        self.enter("run")
        self.emit("before_run")

    def end_run(self) -> None:
        self.turn("end_run")
        if self.asked.stop:  # later ones come too late
            self.exit_code = self.asked.exit_code
        self.now = self.at()
        reason = self.why_stopped()
        self.emit("after_run", self.now, bool(reason), reason)
        self.save_point(force=True)
        if self.asked.save and not self.has_trained:
            self.asked.names.append(self.unnamed)
            self.asked.save = False
        names, self.asked.names = self.asked.names, []
        self.skip(names)
        self.close()
        if self.exit_code:
            raise Preempted

    def why_stopped(self) -> str:
        if self.asked.reason or self.asked.stop:
            return self.asked.reason or "run.stop() was called"
        for name, done, limit in (
            ("epochs", self.counts.epoch, self.max_epochs),
            ("iterations", self.counts.iter, self.max_iters),
        ):
            if self.has_trained and limit is not None and done < limit:
                return f"the training ended after {done} of {limit} {name}"
        return ""

    def fail(self, error: BaseException) -> None:
        if not self.scopes:
            raise Refused
        with suppress(Boom):  # a note of the error
            self.emit("on_exception")
        self.close()

    def begin_train(self, *, max_epochs: int | None = None, max_iters: int | None = None) -> None:
        self.turn("begin_train")
        if max_epochs or max_iters:
            self.max_epochs, self.max_iters = max_epochs, max_iters
        self.enter("train")
        self.has_trained = True
        self.now = self.at()
        self.emit("before_train")

    def end_train(self) -> None:
        self.turn("end_train")
        self.train_ends()
        self.now = self.at()
        self.emit("after_train")
        self.save_point(force=True)
        self.leave("train")

    def train_ends(self) -> None:
        if not self.asked.stop:  # no validation has followed
            self.counts.phase = "train"
        self.call()

    def begin_epoch(self) -> None:
        self.turn("begin_epoch")
        self.counts.phase = "train"
        self.call()
        self.enter("epoch")
        self.counts.batches = 0
        self.now = self.at()
        self.emit("before_train_epoch")

    def end_epoch(self) -> None:
        self.turn("end_epoch")
        counts = self.counts
        if not counts.batches:
            self.now = self.at()
        elif self.now is not self.last:  # evaluated behind it
            self.now = self.last._replace(validation=counts.validations)
        self.emit("after_train_epoch")
        counts.epoch, counts.batches, counts.phase = counts.epoch + 1, 0, "val"
        self.epoch_ends()
        self.leave("epoch")

    def abandon_epoch(self) -> None:
        self.turn("abandon_epoch")
        if self.scope == "epoch":
            self.call()
        if self.has("iteration"):
            self.abandon_iteration()
        self.leave("epoch")

    def begin_iteration(self) -> None:
        self.turn("begin_iteration")
        self.call()
        if self.asked.stop and not self.asks:
            self.abandon_epoch()
            self.end_train()
            self.end_run()
            raise Stopped
        self.enter("iteration")
        self.steps, self.counts.phase = 0, "train"
        self.now = self.at()
        self.emit("before_train_iter")

    def step(self) -> None:
        """A step of the optimizer; one outside of an iteration is not counted."""
        inside = self.has("iteration")
        if not self.scopes:
            return
        if inside and self.saves_before_step:  # it must not wait longer: the weights change
            before = copy(self.counts)
            self.count_iteration()
            try:
                self.save_held()
            finally:
                self.counts = before
        if inside and self.steps:  # each further one is an update of its own
            self.now = self.now._replace(update=self.counts.update + self.steps)
        self.emit("before_optimizer_step")
        self.steps += inside
        self.emit("after_optimizer_step")

    def end_iteration(self) -> None:
        self.turn("end_iteration")
        self.emit("after_train_iter")
        self.count_iteration()
        self.iteration_ends()
        self.leave("iteration")
        self.handle()

    def iteration_ends(self) -> None:
        """A loop of calls saves behind the iteration."""

    def epoch_ends(self) -> None:
        """And so behind an epoch."""

    def abandon_iteration(self) -> None:
        self.turn("abandon_iteration")
        self.count_iteration()
        self.leave("iteration")

    def begin_evaluation(self, stage: str) -> None:
        self.turn("begin_evaluation")
        if self.scope == "iteration":
            self.interrupted = self.now
        else:
            if stage == "val" and self.has("train"):
                self.counts.phase = "val"
            self.call()
        self.stage, self.index = stage, 0
        self.enter("evaluation")
        self.look()
        self.emit(f"before_{stage}")
        self.emit(f"before_{stage}_epoch")
        self.index = -1

    def look(self) -> None:
        """In the body of an iteration that has stepped, an evaluation sees the weights behind it."""
        self.now = self.at(self.stage, self.index)
        if self.interrupted is not None and self.steps:
            self.now = self.now._replace(iter=self.counts.iter + 1, update=self.counts.update + self.steps)

    def begin_evaluation_iteration(self) -> None:
        self.turn("begin_evaluation_iteration")
        self.index += 1
        self.look()
        self.enter("evaluation_iteration")
        self.emit(f"before_{self.stage}_iter")

    def end_evaluation_iteration(self) -> None:
        self.turn("end_evaluation_iteration")
        self.emit(f"after_{self.stage}_iter")
        if not self.save_waits:
            self.save_point()
        self.leave("evaluation_iteration")
        self.handle()

    def end_evaluation(self) -> None:
        self.turn("end_evaluation")
        if self.stage == "val":
            self.counts.phase = "train"
        self.emit(f"after_{self.stage}_epoch")
        self.counts.validations += self.stage == "val"
        self.counts.tests += self.stage == "test"
        if self.interrupted is not None and self.asked.names and self.steps:
            self.saves_before_step = True
        if not self.save_waits:
            self.save_point(force=True)
        self.leave("evaluation")
        self.emit(f"after_{self.stage}")
        if not self.save_waits:
            self.save_point()
        self.go_on()
        self.handle()

    def abandon_evaluation(self) -> None:
        self.turn("abandon_evaluation")
        if self.interrupted is None:
            self.call()
        self.leave("evaluation")
        self.go_on()

    def go_on(self) -> None:
        if self.interrupted is not None:
            self.now, self.interrupted = self.interrupted, None


class Train:
    """``run.train(range(length), accumulate=accumulate)``: an epoch."""

    def __init__(self, length: int, accumulate: int) -> None:
        self.length, self.accumulate = length, accumulate
        self.used = 0
        self.begun = self.over = self.left = False


class Evaluation:
    """``run.validate(range(length))`` or ``run.test()``."""

    def __init__(self, stage: str, length: int) -> None:
        self.stage, self.length = stage, length
        self.used = 0
        self.begun = self.over = self.stop_waits = False


class Loops(Model):
    """What a run does at each turn of the ``for`` statements of a loop."""

    def __init__(self, *, saves: bool = True) -> None:
        super().__init__(saves=saves)
        self.body: int | None = None
        """The epoch whose body is open: a save behind its batches waits for the end of the body."""
        self.passes = 0
        """How often training, validation and test have begun in it."""
        self.changed = False
        """Code of the body has changed the weights outside of the training: a stop must not skip what changes them back."""
        self.training: Train | None = None
        self.evaluating: Evaluation | None = None
        self.begun_at: tuple[int, int, int] | None = None
        self.left_iteration = False

    @property
    def save_waits(self) -> bool:
        if self.interrupted is not None:
            return self.steps > 0
        return self.body is not None and not self.has("epoch")

    @property
    def window_open(self) -> bool:
        training = self.training
        return training is not None and self.has("epoch") and self.counts.batches % training.accumulate > 0

    def call(self) -> None:
        """A save does not wait for a call."""

    def train_ends(self) -> None:
        """As :meth:`epochs` has left it."""

    def iteration_ends(self) -> None:
        training = self.training
        complete = self.max_iters is not None and self.counts.iter >= self.max_iters
        last = complete or self.left_iteration or (training is not None and training.used >= training.length)
        if not (self.body is not None and last) and (self.asked.names or self.asked.save):
            self.save_held(force=False)

    def epoch_ends(self) -> None:
        if self.body is None:
            self.save_point(force=True)

    # ---------------------------------------------------------------------------------------------------------- turns

    def epochs(self, *, max_epochs: int | None = None, max_iters: int | None = None) -> None:
        self.max_epochs, self.max_iters = max_epochs, max_iters

    def next_epoch(self) -> bool:
        """Return whether there is a next epoch."""
        self.abandon()
        self.end_left_epoch()
        self.end_body()
        counts = self.counts
        stops = self.should_stop()
        done = counts.iter >= self.max_iters if self.max_iters else counts.epoch >= (self.max_epochs or 0)
        if done and not stops:
            counts.phase = "train"
        if stops or done:
            if self.has("train"):
                self.end_train()
            return False
        self.train()
        counts.phase = "train"
        if self.begun_at == (reached := (counts.epoch, counts.iter, counts.batches)):
            raise Mistake  # it would repeat for ever
        self.begun_at, self.body, self.passes = reached, counts.epoch, 0
        self.changed = False
        self.now = self.at()
        return True

    def end_body(self) -> None:
        if self.body is not None:
            self.body = None
            if not self.counts.batches:
                self.counts.phase = "train"
            self.save_held()

    def train(self) -> None:
        if not self.has("train"):
            self.begin_train()

    def abandon(self) -> None:
        """The next call ends an evaluation that was left."""
        self.evaluating = None
        if self.has("evaluation"):
            self.abandon_evaluation()

    def end_left_iteration(self) -> None:
        """An iteration that has stepped ends as any other, although its body was left."""
        self.abandon()
        if self.has("iteration"):
            self.left_iteration = True
            try:
                self.end_iteration() if self.steps else self.abandon_iteration()
            finally:
                self.left_iteration = False

    def end_left_epoch(self) -> None:
        if self.has("epoch"):
            self.end_left_iteration()
            self.end_epoch()
            self.changed = False
        self.training = None

    def step(self) -> None:
        if self.training is not None and self.training.left:
            self.end_left_iteration()
        self.changed |= not self.has("epoch")
        super().step()

    def change(self) -> None:
        """Code of the body changes the weights."""
        self.changed = True

    def raise_stop(self) -> None:
        self.body = None
        raise Stopped

    def iterate(self, one: Train) -> None:
        """``iter(one)``: behind a ``break``, its next batch begins another iteration."""
        if one.begun and not one.over:
            one.over = self.training is not one
            if not one.over and one.left:
                self.end_left_iteration()
        one.left = False

    def next_batch(self, one: Train) -> bool:
        counts = self.counts
        if one.over or not (one.begun or self.first_batch(one)):
            return False
        if self.interrupted is not None:
            self.abandon()
        if self.scope == "iteration":
            self.end_iteration()
        complete = self.max_iters is not None and counts.iter >= self.max_iters
        if self.should_stop() and not (complete or one.used >= one.length):  # else it cuts nothing short
            one.over = True
            self.training = None
            self.abandon_epoch()
            self.raise_stop()
        if complete or one.used == one.length:
            one.over = True
            self.end_left_epoch()
            return False
        one.used += 1
        self.begin_iteration()
        return True

    def first_batch(self, one: Train) -> bool:
        one.begun = True
        self.train()
        if self.training is not None and not self.training.left:
            raise Mistake  # in the body of another one
        self.abandon()
        self.end_left_epoch()
        self.passes += 1
        if self.max_iters is not None and self.counts.iter >= self.max_iters and not self.counts.batches:
            one.over = True
            return False
        if self.should_stop():
            one.over = True
            self.raise_stop()
        self.counts.phase = "train"
        if self.passes > 1:
            self.save_held()
        if self.body is not None:  # another pass of the same epoch
            self.counts.epoch = self.body
        self.training = one
        self.begin_epoch()
        return True

    def next_evaluated(self, one: Evaluation) -> bool:
        if one.over:
            return False
        if one.begun:
            self.end_evaluation_iteration()
        else:
            self.first_evaluated(one)
        if self.interrupted is None and not one.stop_waits and self.should_stop():
            one.over = True
            self.abandon()
            self.raise_stop()
        if one.used == one.length:
            one.over = True
            self.end_evaluation()
            self.evaluating = None
            return False
        one.used += 1
        self.begin_evaluation_iteration()
        return True

    def first_evaluated(self, one: Evaluation) -> None:
        self.abandon()
        if self.training is not None and self.training.left:
            self.end_left_epoch()
        nested = self.has("iteration")
        if not nested:
            self.passes += 1
            if one.stage == "val" and self.has("train"):
                self.counts.phase = "val"
        one.stop_waits = not nested and self.saves and self.changed and self.body is not None
        if not nested and not one.stop_waits and self.should_stop():
            one.over = True
            self.raise_stop()
        one.begun, self.evaluating = True, one
        self.begin_evaluation(one.stage)

    def leave_evaluation(self, one: Evaluation) -> None:
        if self.evaluating is one:
            one.over = True
            self.abandon()

    def exit(self, error: Exception | None = None) -> None:
        """End of ``with run:``."""
        if error is not None and not isinstance(error, Stopped):
            self.fail(error)
            return
        try:
            self.leave_all(cut=error is not None)
            self.end_run()
        except Exception as other:
            if self.scopes:
                self.fail(other)
            raise

    def leave_all(self, *, cut: bool) -> None:
        if not cut:
            self.end_left_iteration()
        self.abandon()
        self.training = None
        if self.has("epoch"):
            self.abandon_epoch()
        if not cut:
            self.end_body()
        self.body = None
        if self.has("train"):
            self.end_train()

    def close(self) -> None:
        super().close()
        self.body = self.training = self.evaluating = None
