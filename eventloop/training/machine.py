"""The order of a run: in which scope each call is in turn, what it publishes, and where the run is then.

:data:`TURNS` is that order, and nothing else decides when an event comes. The iterators and ``TrainLoop`` make these calls,
bridges make them for another trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from trainbus.eventloop import events as ev
from trainbus.eventloop.errors import TrainingError, stopped
from trainbus.eventloop.events import Event, Progress, Stage
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.schema import SavedCounts

log = get_logger()


class Scope(StrEnum):
    """A part of a run. It begins with its ``before_x``, and ends with its ``after_x``, or without that if it is abandoned."""

    CLOSED = "before the run has begun or after it has ended"
    RUN = "inside a run"
    TRAIN = "inside a training"
    EPOCH = "inside an epoch"
    ITERATION = "inside an iteration"
    VAL = "inside a validation"
    VAL_ITERATION = "inside an iteration of a validation"
    TEST = "inside a test"
    TEST_ITERATION = "inside an iteration of a test"
    AROUND = "where the validation or test was begun"


CLOSED, RUN, TRAIN, EPOCH, ITERATION, VAL, VAL_ITERATION, TEST, TEST_ITERATION, AROUND = Scope

ITERATIONS: Final = (ITERATION, VAL_ITERATION, TEST_ITERATION)
"""In these a run has outputs."""

EVALUATED_IN: Final = (RUN, TRAIN, EPOCH, ITERATION)
"""Where a validation or test may begin."""


class Turn(NamedTuple):
    """What a call does: it publishes these events, in order. Then the innermost scope is ``to``."""

    events: tuple[type[Event], ...]
    to: Scope


TURNS: Final[Mapping[tuple[Scope, str], Turn]] = {
    (CLOSED, "begin_run"): Turn((ev.BeforeRun,), RUN),
    (RUN, "begin_train"): Turn((ev.BeforeTrain,), TRAIN),
    (TRAIN, "begin_epoch"): Turn((ev.BeforeTrainEpoch,), EPOCH),
    (EPOCH, "begin_iteration"): Turn((ev.BeforeTrainIter,), ITERATION),
    (ITERATION, "end_iteration"): Turn((ev.AfterTrainIter,), EPOCH),
    (EPOCH, "end_epoch"): Turn((ev.AfterTrainEpoch,), TRAIN),
    (TRAIN, "end_train"): Turn((ev.AfterTrain,), RUN),
    (RUN, "end_run"): Turn((ev.AfterRun,), CLOSED),
    # a validation
    **{(scope, "begin_evaluation val"): Turn((ev.BeforeVal, ev.BeforeValEpoch), VAL) for scope in EVALUATED_IN},
    (VAL, "begin_evaluation_iteration"): Turn((ev.BeforeValIter,), VAL_ITERATION),
    (VAL_ITERATION, "end_evaluation_iteration"): Turn((ev.AfterValIter,), VAL),
    (VAL, "end_evaluation"): Turn((ev.AfterValEpoch, ev.AfterVal), AROUND),
    # a test
    **{(scope, "begin_evaluation test"): Turn((ev.BeforeTest, ev.BeforeTestEpoch), TEST) for scope in EVALUATED_IN},
    (TEST, "begin_evaluation_iteration"): Turn((ev.BeforeTestIter,), TEST_ITERATION),
    (TEST_ITERATION, "end_evaluation_iteration"): Turn((ev.AfterTestIter,), TEST),
    (TEST, "end_evaluation"): Turn((ev.AfterTestEpoch, ev.AfterTest), AROUND),
    # left early
    (ITERATION, "abandon_iteration"): Turn((), EPOCH),
    (ITERATION, "abandon_epoch"): Turn((), TRAIN),
    (EPOCH, "abandon_epoch"): Turn((), TRAIN),
    **{(scope, "abandon_evaluation"): Turn((), AROUND) for scope in (VAL, VAL_ITERATION, TEST, TEST_ITERATION)},
}
"""The calls by the innermost scope that they are in turn in. ``begin_evaluation`` has its stage behind it.

The events of an optimizer step, of a save, and of requests such as a pause come inside a scope and do not change it.
"""


class Counters(SavedCounts):
    """The counts of a run, its limits and its name. A resumed run may have other limits and another name."""

    max_epochs: int | None = None
    max_iters: int | None = None
    run_name: str = ""

    def snapshot(self, stage: Stage = "train", batch_idx: int | None = None) -> Progress:
        """Return the counts as the frozen ``Progress`` of events."""
        index = self.batches if batch_idx is None else batch_idx
        passes = self.tests if stage == "test" else self.validations
        # By position, because every iteration makes one.
        return Progress(
            self.epoch, self.iter, self.update, index, passes, self.max_epochs, self.max_iters, stage, self.run_name
        )

    @property
    def complete(self) -> bool:
        """True if the training has reached its limit."""
        return self.epoch == self.max_epochs or self.iter == self.max_iters

    def lacking(self) -> str:
        """Return how far a training came that has not reached its limit; empty if it has, or has none."""
        for name, done, limit in (("epochs", self.epoch, self.max_epochs), ("iterations", self.iter, self.max_iters)):
            if limit is not None and done < limit:
                return f"the training ended after {done:,} of {limit:,} {name}"
        return ""

    def limit(self, max_epochs: int | None, max_iters: int | None) -> None:
        """Set the limits of the training."""
        self.max_epochs, self.max_iters = max_epochs, max_iters

    def go_to(self, *, epoch: int, batches: int, iteration: int | None = None) -> None:
        """Take over the counts of another trainer."""
        self.epoch, self.batches = epoch, batches
        self.iter = self.iter if iteration is None else iteration

    def begin_epoch(self) -> None:
        """Begin an epoch with its first batch."""
        self.batches = 0

    def end_iteration(self, steps: int) -> None:
        """Count an iteration with this many optimizer steps."""
        self.iter, self.batches, self.update, self.phase = self.iter + 1, self.batches + 1, self.update + steps, "train"

    def end_epoch(self, *, validates: bool, cut: bool) -> None:
        """Count an epoch. ``validates`` tells that a validation may follow it, ``cut`` that a limit has cut it short."""
        self.cut = self.batches if cut else 0
        self.epoch, self.batches = self.epoch + 1, 0
        if validates:
            self.phase = "val"

    def go_on_behind_limit(self) -> bool:
        """Return to the last epoch if a limit has cut it short; return whether it has."""
        if cut := self.cut:
            self.epoch, self.batches, self.cut = self.epoch - 1, cut, 0
        return cut > 0

    def end_evaluation(self, stage: Stage) -> None:
        """Count a validation or test."""
        self.validations += stage == "val"
        self.tests += stage == "test"

    def go_to_phase(self, phase: Literal["train", "val"]) -> None:
        """Note what a resumed run does first."""
        self.phase = phase

    def begin_body(self, epoch: int | None, place: int = 0) -> None:
        """Enter the body of an epoch of the user's own loop, at this place in it; with None, no body is open."""
        self.body, self.place = epoch, place

    def reach(self, place: int) -> None:
        """Note how often passes have begun and ended in the open body."""
        self.place = place

    def stay_in_body(self) -> None:
        """Begin another pass of the open body, which is one of the same epoch."""
        if self.body is not None:
            self.epoch = self.body

    def rename(self, name: str) -> None:
        """Set the name of the run."""
        self.run_name = name

    def saved(self) -> SavedCounts:
        """Return the counts to save."""
        return SavedCounts(*(getattr(self, name) for name in SavedCounts.__struct_fields__))

    def restore(self, saved: SavedCounts) -> None:
        """Restore saved counts."""
        for name in SavedCounts.__struct_fields__:
            setattr(self, name, getattr(saved, name))


class Machine:
    """Where a run is: a stack of open scopes, each with functions to call when it ends."""

    def __init__(self) -> None:
        self.innermost = CLOSED
        """The innermost open scope."""
        self._open: dict[Scope, list[Callable[[], object]]] = {}
        self._cut_short: Callable[[], object] | None = None

    def __contains__(self, scope: Scope) -> bool:
        return scope in self._open

    @property
    def is_open(self) -> bool:
        """True from ``begin_run`` to the end of the run."""
        return self.innermost is not CLOSED

    @property
    def evaluates(self) -> bool:
        """True in a validation or test."""
        return VAL in self._open or TEST in self._open

    def turn(self, call: str) -> Turn:
        """Return what a call does here.

        Raises:
            TrainingError: it is out of turn; the error names the expected calls.
        """
        try:
            return TURNS[self.innermost, call]
        except KeyError:
            raise self._out_of_turn(call) from None

    def _out_of_turn(self, call: str) -> TrainingError:
        names = dict.fromkeys(call.partition(" ")[0] for scope, call in TURNS if scope is self.innermost)
        *most, last = (f"drive.{name}()" for name in names)
        expected = f"{', '.join(most)} or {last}" if most else last
        return TrainingError(f"drive.{call.partition(' ')[0]}() is out of turn {self.innermost}; expected {expected}")

    def enter(self, scope: Scope) -> None:
        """Open a scope inside the innermost one."""
        self._open[scope] = []
        self.innermost = scope

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost scope ends; last registered, first called.

        Register ``undo`` before the action that it reverts, and let it check how much to revert: Ctrl-C may interrupt the
        action. If Ctrl-C interrupts ``undo``, it is called once more.
        """
        if not callable(undo):
            raise TypeError(f"run.defer() takes a function to call later, not {undo!r}: write run.defer(f), not run.defer(f())")
        if not self._open:
            raise RuntimeError("run.defer() needs an open run: call it inside `with run:`")
        self._open[self.innermost].append(undo)

    def go(self, turn: Turn) -> None:
        """Open or end scopes, so that the innermost one is that of the turn."""
        if turn.to is AROUND:
            self.leave(VAL if VAL in self._open else TEST)
        elif turn.to is CLOSED:
            self.leave(RUN)
        elif turn.to in self._open:
            scopes = [*self._open]
            self.leave(scopes[scopes.index(turn.to) + 1])
        else:
            self.enter(turn.to)

    def leave(self, scope: Scope) -> None:
        """End a scope and every scope still open inside it.

        All deferred functions are called; then the first error among them is raised.
        """
        if self.innermost is scope and not self._open[scope]:  # the usual case
            del self._open[scope]
            self.innermost = next(reversed(self._open), CLOSED)
            return
        first: Exception | None = None
        while scope in self._open:
            inner = next(reversed(self._open))
            undos = self._open[inner]
            while undos:
                try:
                    undos[-1]()
                except Exception as error:
                    log.exception("a deferred function failed", id="deferred-function-failed", scope=inner.name.lower())
                    if isinstance(error, StopIteration):  # the iterators of the run end scopes
                        error = stopped(error, f"the deferred function {getattr(undos[-1], '__qualname__', undos[-1])!s}")
                    first = first or error
                except BaseException:  # Ctrl-C: unwind() calls the function once more
                    if undos[-1] is self._cut_short:
                        undos.pop()
                    else:
                        self._cut_short = undos[-1]
                    raise
                undos.pop()
            self._open.pop(inner, None)  # the garbage collector may have ended it meanwhile, with a `for` statement's iterator
            self.innermost = next(reversed(self._open), CLOSED)
        if first is not None:
            raise first

    def unwind(self) -> None:
        """End all scopes after an exception. Log errors of deferred functions; a Ctrl-C is raised after the last scope."""
        interrupted: BaseException | None = None
        while self._open:
            try:
                with suppress(Exception):  # leave() has logged it
                    self.leave(next(iter(self._open)))
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted
