"""The iterators of a run: they call :class:`~eventloop.training.driver.Driver` (pull).

They are objects, because a generator cannot tell ``break`` from an exception in the loop's body. Inside, a value instead of
StopIteration marks the end, because user code may raise StopIteration by mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

from eventloop.errors import TrainingError, stopped
from eventloop.log import get_logger
from eventloop.training.data import Feed
from eventloop.training.driver import Driver, EvaluationStage
from eventloop.training.metrics import Metrics
from eventloop.training.repeat import Repeat, end_repeated, end_unvalidated
from eventloop.training.saves.contents import SavedRun

log = get_logger()


class OpenLoops:
    """Track the open ``for`` statements of the user's loop, for all iterators of a run; end the scopes that they left."""

    def __init__(self, drive: Driver, run: SavedRun) -> None:
        self.drive = drive
        self.run = run
        self.scopes = drive.state.scopes
        self.forget()

    def forget(self) -> None:
        """Drop all references to the loaders."""
        self.epoch_already_trained = False
        """True in a resumed run whose epoch is fully trained but not validated."""
        self.training: object | None = None
        """The iterator whose epoch is open."""
        self.broken_out = False
        """True if its body was left with ``break``."""
        self.evaluating: object | None = None
        self.epoch_ends: bool | None = None
        """True if the open epoch must end after the current iteration; None if it cannot end early."""

    def begin_train(self) -> None:
        """Begin the training if it has not begun."""
        if not self.drive.state.training:
            self.drive.state.check_open("run.epochs() and run.train()")
            self.drive.begin_train()

    def drop_iteration(self) -> None:
        """End an open iteration without its ``after_train_iter``."""
        end_unvalidated(self.drive.state)
        if "iter" in self.scopes:
            self.drive.abandon_iteration()

    def end_epoch(self) -> None:
        """End the open epoch, if any, and drop an iteration that ``break`` left open."""
        if "epoch" in self.scopes:
            self.drop_iteration()
            self.drive.end_epoch()
            self._warn_without_update()
        self._no_epoch()

    def _warn_without_update(self) -> None:
        state = self.drive.state
        if state.trains and state.counters.epoch == 1 and not state.counters.update:
            log.warning(
                "no optimizer has stepped in the first epoch, so averages and schedules did nothing: call optimizer.step(), "
                "and give the run the optimizer that steps"
            )

    def abandon_evaluation(self) -> None:
        """End a validation or test early if one is open, after ``break`` or a stop."""
        self.evaluating = None
        self.drive.drop_evaluation()

    def abandon_epoch(self) -> None:
        """End the open epoch early, if any."""
        self._no_epoch()
        if "epoch" in self.scopes:
            self.drive.abandon_epoch()

    def _no_epoch(self) -> None:
        self.training, self.broken_out, self.epoch_ends = None, False, None

    def end_train(self) -> None:
        """End the training if it has begun."""
        if self.drive.state.training:
            self.drive.end_train()


class _Steps:
    """An iterator whose ``_advance`` returns the next value in a tuple, or None at the end."""

    _advance: Callable[[], tuple[Any] | None]
    _method: str
    """Name for errors, such as ``"run.train()"``."""

    def __next__(self) -> Any:
        try:
            step = self._advance()
        except StopIteration as error:
            raise stopped(error, f"code that {self._method} called") from error
        if step is None:
            raise StopIteration
        return step[0]


class Epochs(_Steps):
    """Yield the indices of the remaining epochs. A resumed run that must validate first yields the previous epoch."""

    _method = "run.epochs()"

    def __init__(self, loops: OpenLoops) -> None:
        self._loops = loops
        self._state = loops.drive.state
        self._pending_validation = loops.drive.validation_comes_first
        self._yielded = False
        self._iter = self._state.counters.iter
        self._begun_at: tuple[int, int, int] | None = None
        """The progress when the last epoch to train was yielded."""

    def __iter__(self) -> Self:
        return self

    def _advance(self) -> tuple[int] | None:
        loops, state, counters = self._loops, self._state, self._state.counters
        loops.abandon_evaluation()
        loops.end_epoch()
        if self._pending_validation:
            self._pending_validation, self._yielded = False, True
            loops.begin_train()
            loops.epoch_already_trained = counters.batches == 0
            return (counters.epoch if counters.batches else max(0, counters.epoch - 1),)
        loops.epoch_already_trained = False
        state.settle()
        if state.should_stop():  # keep the phase, so that a resume repeats an interrupted validation
            loops.end_train()
            return None
        state.go_on()
        if self._done():
            if state.resumed and not self._yielded and not state.has_trained:
                loops.begin_train()  # the saved run may have ended before after_train
            loops.end_train()
            return None
        reached = (counters.epoch, counters.iter, counters.batches)
        if reached == self._begun_at:
            raise TrainingError(
                f"epoch {counters.epoch + 1} has trained nothing, and run.epochs() would repeat it forever: iterate over "
                "run.train(loader) instead of the loader in every epoch"
            )
        loops.begin_train()
        self._begun_at = reached
        self._yielded = True
        return (counters.epoch,)

    def _done(self) -> bool:
        """Return True if no epoch is left; warn if an earlier run has trained them all, even if this one validated the last."""
        counters = self._state.counters
        if counters.max_iters is not None:
            # A run resumed after its last iteration must still end the epoch.
            limit, done = f"max_iters={counters.max_iters}", counters.iter >= counters.max_iters and not counters.batches
        else:
            limit = f"max_epochs={counters.max_epochs}"
            done = counters.max_epochs is not None and counters.epoch >= counters.max_epochs
        if done and self._begun_at is None and counters.iter == self._iter:
            log.warning(
                f"nothing is left to train: {limit} was reached before; to train on, give a larger limit, such as "
                f"run({self._further()}); to start over, make a new loop, with a new model, that does not resume",
                epochs=counters.epoch,
                iters=counters.iter,
            )
        return done

    def _further(self) -> str:
        counters = self._state.counters
        if counters.max_iters is not None:
            return f"max_iters={2 * counters.max_iters}"
        return f"max_epochs={2 * (counters.max_epochs or 1)}"


class Batches(_Steps):
    """Batches that notice the end of the ``for`` statement over them, also by ``break``.

    In ``with run.train(loader) as batches:`` (or ``run.validate``) they notice the end of the block instead.
    """

    _in_block = False
    leave: Callable[[], None]
    """End the scopes that the body left open; no effect after the last batch."""

    def __iter__(self) -> Iterator[Any]:
        return self if self._in_block else _Body(self)

    def __enter__(self) -> Self:
        self._in_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self._in_block = False
        self.leave()


class _Body(_Steps):
    """The iterator of one ``for`` statement. Only the statement refers to it, so Python deletes it at the statement's end."""

    def __init__(self, batches: Batches) -> None:
        self._advance = batches._advance
        self._method = batches._method
        self._leave = batches.leave
        self._thread = threading.get_ident()

    def __iter__(self) -> Self:
        return self

    def __del__(self) -> None:
        # The garbage collector may call this on another thread; then the next call of the run ends the scopes.
        if self._thread == threading.get_ident():
            self._leave()


class TrainBatches(Batches):
    """Yield the batches of one training epoch. After ``break``, another ``for`` statement continues with the next batch."""

    _method = "run.train()"

    def __init__(self, loops: OpenLoops, feed: Feed, *, endless: bool) -> None:
        self._loops = loops
        self._drive = loops.drive
        self._feed = feed
        self._endless = endless
        self._begun = False
        self._over = loops.epoch_already_trained

    def __iter__(self) -> Iterator[Any]:
        loops = self._loops
        if self._begun and not self._over:
            self._over = loops.training is not self  # its epoch has ended since
            if loops.broken_out and not self._over:
                loops.broken_out = False
                loops.drop_iteration()
        return super().__iter__()

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        loops, drive = self._loops, self._drive
        state, counters = drive.state, drive.state.counters
        if not self._begun and not state.should_stop() and (repeated := self._begin()) is not None:
            return repeated
        if state.scopes.innermost != "iter":
            loops.abandon_evaluation()
            end_unvalidated(state)
        ended = state.scopes.innermost == "iter"
        if ended:
            drive.end_iteration()  # handles requests
        if (plan := state.plan) is not None and plan.asked and not state.window_open:
            plan.validate()
        complete = self._begun and counters.max_iters is not None and counters.iter >= counters.max_iters
        complete = complete or (loops.epoch_ends is True and not state.window_open)
        stops = (state.urgent or not ended) and state.should_stop()
        if stops and not (complete or (self._begun and self._feed.last)):  # else it cuts nothing short
            self._over = True
            loops.abandon_epoch()
            return None
        batch = None if complete else self._feed.next()
        if batch is None:
            self._over = True
            loops.end_epoch()
            return None
        drive.begin_iteration(batch[0])
        return batch

    def _begin(self) -> tuple[Any] | None:
        """Begin the epoch; first end an epoch whose body was left. Return the batch of an iteration to repeat, if any."""
        loops, drive = self._loops, self._drive
        self._begun = True
        loops.begin_train()
        if loops.training is not None and not loops.broken_out:
            raise TrainingError(
                "run.train() begins in the body of another run.train(): iterate over the inner loader itself, or first end the "
                "outer epoch by `break` out of its `for` statement"
            )
        loops.end_epoch()
        loops.training = self
        loops.epoch_ends = None if self._endless else False
        inside = drive.validation_comes_first and drive.state.counters.batches > 0 and not loops.run.host.update_steps
        repeat = Repeat(loops.run, self._feed) if inside else None
        drive.begin_epoch(self._feed, endless=self._endless)
        return None if repeat is None else repeat.begin()

    def leave(self) -> None:
        """Note that the body was left, by ``break`` if its epoch is still open.

        The next call of the run ends the epoch, because an exception must be reported first.
        """
        self._loops.broken_out |= self._loops.training is self


class EvaluationBatches(Batches):
    """Yield the batches of one validation or test; afterwards ``metrics`` holds the result."""

    def __init__(self, loops: OpenLoops, feed: Feed, metrics: Metrics, stage: EvaluationStage) -> None:
        self._loops = loops
        self._feed = feed
        self._validates = stage == "val"
        self._method = "run.validate()" if self._validates else "run.test()"
        self._begin = partial(loops.drive.begin_evaluation, stage, feed, metrics)
        self._begun = False
        self._over = False
        self.metrics: Mapping[str, Any] = {}
        """Values by name; empty until the iterator is exhausted."""

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        loops, drive, state = self._loops, self._loops.drive, self._loops.drive.state
        if self._begun:
            drive.end_evaluation_iteration()
        else:
            state.check_open("run.validate() and run.test()")
            loops.abandon_evaluation()
            if loops.broken_out:
                loops.end_epoch()
            if self._validates:
                end_repeated(state)
            if "iter" in state.scopes:
                drive.end_iteration(validates=self._validates)
            self._over = state.should_stop()
            if self._over:
                return None
            self._begun, loops.evaluating = True, self
            self._begin()
        self._over = state.should_stop()
        if self._over:
            loops.abandon_evaluation()
            return None
        batch = self._feed.next(may_be_empty=state.ranks is not None)
        if batch is None:
            self._over = True
            self.metrics = drive.end_evaluation()
            return None
        drive.begin_evaluation_iteration(batch[0])
        return batch

    def leave(self) -> None:
        """End the evaluation early, without its ``after_x``; restore modes, gradients and weights."""
        if self._loops.evaluating is self:
            self._over = True
            try:
                self._loops.abandon_evaluation()
            except BaseException as error:  # noqa: BLE001 - __del__ cannot raise: the end of the enclosing scope does
                self._loops.scopes.defer(partial(_raise, error))


def _raise(error: BaseException) -> None:
    raise error
