"""The iterators of a run: they call :class:`~eventloop.training.driver.Driver` (pull).

They are objects, because a generator cannot tell ``break`` from an exception in the loop's body. Inside, a value instead of
StopIteration marks the end, because user code may raise StopIteration by mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Self

from eventloop.errors import TrainingError, stopped
from eventloop.events import Stage
from eventloop.log import get_logger
from eventloop.training.data import Feed
from eventloop.training.driver import Driver
from eventloop.training.metrics import Metrics

log = get_logger()


class Bodies:
    """Track the open ``for`` statements of the user's loop, for all iterators of a run."""

    def __init__(self, drive: Driver) -> None:
        self.drive = drive
        self.nothing_left = False
        """True in a resumed run whose epoch is fully trained but not validated."""
        self._training: object | None = None  # the TrainBatches whose epoch is open
        self._left = False  # its body was left with `break`
        self._evaluating: object | None = None

    def begin_train(self) -> None:
        """Begin the training if it has not begun."""
        if not self.drive.state.training:
            self.drive.state.check_open("run.epochs() and run.train()")
            self.drive.begin_train()

    def begin_epoch(self, feed: Feed, batches: object, *, endless: bool) -> None:
        """Begin the epoch of ``batches``; first end an epoch whose body was left.

        Raises:
            TrainingError: the call is in the body of another epoch.
        """
        self.begin_train()
        if self._training is not None and not self._left:
            raise TrainingError(
                "run.train() begins in the body of another run.train(): iterate over the inner loader itself, or first end the "
                "outer epoch by `break` out of its `for` statement"
            )
        self.end_epoch()
        self._training, self._left = batches, False
        self.drive.begin_epoch(feed, endless=endless)

    def leave_epoch(self, batches: object) -> None:
        """Note that the body of ``batches`` was left, by ``break`` if its epoch is still open.

        The next call of the run ends the epoch, because an exception must be reported first.
        """
        self._left = self._left or self._training is batches

    def go_on_in_epoch(self, batches: object) -> bool:
        """Continue the epoch of ``batches`` after ``break``; return False if it has ended since."""
        if self._training is not batches:
            return False
        if self._left:
            self._left = False
            self._drop_iteration()
        return True

    def drop_left_iteration(self) -> None:
        """End the iteration that ``break`` left open, and keep its epoch open."""
        if self._left and self._training is not None:
            self._drop_iteration()

    def end_iteration(self) -> None:
        """End the current iteration, if any."""
        if "iter" in self.drive.state.scopes:
            self.drive.end_iteration()

    def end_epoch(self) -> None:
        """End the open epoch, if any, and drop an iteration that ``break`` left open."""
        if "epoch" in self.drive.state.scopes:
            self._drop_iteration()
            self.drive.end_epoch()
        self._training = None

    def abandon_epoch(self) -> None:
        """End the open epoch early, if any."""
        self._training = None
        if "epoch" in self.drive.state.scopes:
            self.drive.abandon_epoch()

    def end_train(self) -> None:
        """End the training if it has begun."""
        if self.drive.state.training:
            self.drive.end_train()

    def begin_evaluation(self, batches: object) -> None:
        """Begin the evaluation of ``batches``; first end an open iteration, and an epoch whose body was left."""
        self.abandon_evaluation()
        if self._left:
            self.end_epoch()
        self.end_iteration()
        self._evaluating = batches

    def abandon_evaluation(self) -> None:
        """End a validation or test early if one is open, after ``break`` or a stop."""
        self._evaluating = None
        if "val" in self.drive.state.scopes:
            self.drive.abandon_validation()
        elif "test" in self.drive.state.scopes:
            self.drive.abandon_test()

    def leave_evaluation(self, batches: object) -> bool:
        """End the evaluation of ``batches`` if it is open; return True if it was.

        The caller (``__del__``) cannot raise, so an error is raised when the enclosing scope ends.
        """
        if self._evaluating is not batches:
            return False
        try:
            self.abandon_evaluation()
        except BaseException as error:  # noqa: BLE001 - raised later
            self.drive.state.scopes.defer(partial(_raise, error))
        return True

    def close(self) -> None:
        """End all open scopes inside the run, at the end of its ``with`` statement."""
        self.abandon_evaluation()
        self.abandon_epoch()
        self.end_train()

    def forget(self) -> None:
        """Drop all references to the loaders."""
        self._training = self._evaluating = None
        self._left = self.nothing_left = False

    def _drop_iteration(self) -> None:
        if "iter" in self.drive.state.scopes:
            self.drive.abandon_iteration()


class _Steps:
    """An iterator whose :meth:`_advance` returns the next value in a tuple, or None at the end."""

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

    def _advance(self) -> tuple[Any] | None:
        raise NotImplementedError


class Epochs(_Steps):
    """Yield the indices of the remaining epochs. A resumed run that must validate first yields the previous epoch."""

    _method = "run.epochs()"

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._state = bodies.drive.state
        self._pending_validation = bodies.drive.validation_comes_first
        self._yielded = False
        self._begun_at: tuple[int, int, int] | None = None
        """The progress when the last epoch to train was yielded."""

    def __iter__(self) -> Self:
        return self

    def _advance(self) -> tuple[int] | None:
        bodies, state, counters = self._bodies, self._state, self._state.counters
        bodies.abandon_evaluation()
        bodies.end_epoch()
        if self._pending_validation:
            self._pending_validation, self._yielded = False, True
            bodies.begin_train()
            bodies.nothing_left = counters.batches == 0
            return (counters.epoch if counters.batches else max(0, counters.epoch - 1),)
        bodies.nothing_left = False
        state.settle()
        if state.should_stop():  # keep the phase, so that a resume repeats an interrupted validation
            bodies.end_train()
            return None
        state.go_on()
        if self._done():
            if not self._yielded:
                self._tell_nothing_left()
                if state.resumed and not state.has_trained:  # the saved run may have ended before after_train
                    bodies.begin_train()
            bodies.end_train()
            return None
        reached = (counters.epoch, counters.iter, counters.batches)
        if reached == self._begun_at:
            raise TrainingError(
                f"epoch {counters.epoch + 1} has trained nothing, and run.epochs() would repeat it forever: iterate over "
                "run.train(loader) instead of the loader in every epoch"
            )
        bodies.begin_train()
        self._begun_at = reached
        self._yielded = True
        return (counters.epoch,)

    def _done(self) -> bool:
        counters = self._state.counters
        if counters.max_iters is not None:
            # A run resumed after its last iteration must still end the epoch.
            return counters.iter >= counters.max_iters and not counters.batches
        return counters.max_epochs is not None and counters.epoch >= counters.max_epochs

    def _tell_nothing_left(self) -> None:
        done = self._state.counters
        limit = f"max_iters={done.max_iters}" if done.max_iters is not None else f"max_epochs={done.max_epochs}"
        log.warning(
            f"nothing is left to train: an earlier run reached {limit}; give a larger limit to continue, or make a new loop to "
            "start over",
            epochs=done.epoch,
            iters=done.iter,
        )


class Batches(_Steps):
    """Batches that notice the end of the ``for`` statement over them, also by ``break``.

    In ``with run.train(loader) as batches:`` (or ``run.validate``) they notice the end of the block instead.
    """

    _in_block = False

    def __iter__(self) -> Iterator[Any]:
        return self if self._in_block else _Body(self)

    def __enter__(self) -> Self:
        self._in_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self._in_block = False
        self.leave()

    def leave(self) -> None:
        """End the scopes that the body left open; no effect after the last batch."""
        raise NotImplementedError


class _Body(Iterator[Any]):
    """The iterator of one ``for`` statement. Only the statement refers to it, so Python deletes it at the statement's end."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._thread = threading.get_ident()

    def __next__(self) -> Any:
        return self._batches.__next__()

    def __del__(self) -> None:
        # The garbage collector may call this on another thread; then the next call of the run ends the scopes.
        if self._thread == threading.get_ident():
            self._batches.leave()


class TrainBatches(Batches):
    """Yield the batches of one training epoch. After ``break``, another ``for`` statement continues with the next batch."""

    _method = "run.train()"

    def __init__(self, bodies: Bodies, feed: Feed, *, endless: bool) -> None:
        self._bodies = bodies
        self._drive = bodies.drive
        self._feed = feed
        self._endless = endless
        self._begun = False
        self._over = bodies.nothing_left

    def __iter__(self) -> Iterator[Any]:
        if self._begun and not self._over:
            self._over = not self._bodies.go_on_in_epoch(self)
        return super().__iter__()

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        bodies, should_stop = self._bodies, self._drive.state.should_stop
        if not self._begun and not should_stop():
            self._begun = True
            bodies.begin_epoch(self._feed, self, endless=self._endless)
        if self._drive.state.scopes.innermost == "iter":  # fast path
            self._drive.end_iteration()
        else:
            bodies.abandon_evaluation()
            bodies.end_iteration()
        if should_stop() and not self._complete():
            self._over = True
            bodies.abandon_epoch()
            return None
        batch = None if self._limit_reached() else self._feed.next()
        if batch is None:
            self._over = True
            bodies.end_epoch()
            return None
        self._drive.begin_iteration(batch[0])
        return batch

    def leave(self) -> None:
        """Leave the epoch; the next call of the run ends it."""
        self._bodies.leave_epoch(self)

    def _complete(self) -> bool:
        """Return True if the epoch is complete, so that a stop cuts nothing short."""
        return self._begun and (self._limit_reached() or self._feed.last)

    def _limit_reached(self) -> bool:
        counters = self._drive.state.counters
        return counters.max_iters is not None and counters.iter >= counters.max_iters


class EvaluationBatches(Batches):
    """Yield the batches of one validation or test; afterwards ``metrics`` holds the result."""

    def __init__(self, bodies: Bodies, feed: Feed, metrics: Metrics, stage: Stage) -> None:
        drive = bodies.drive
        self._bodies = bodies
        self._feed = feed
        self._method = "run.validate()" if stage == "val" else "run.test()"
        self._begin = partial(drive.begin_validation if stage == "val" else drive.begin_test, feed, metrics)
        self._begin_iteration = drive.begin_validation_iteration if stage == "val" else drive.begin_test_iteration
        self._end_iteration = drive.end_validation_iteration if stage == "val" else drive.end_test_iteration
        self._end = drive.end_validation if stage == "val" else drive.end_test
        self._begun = False
        self._over = False
        self.metrics: Mapping[str, Any] = {}
        """Values by name; empty until the iterator is exhausted."""

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        bodies, state = self._bodies, self._bodies.drive.state
        if not self._begun:
            state.check_open("run.validate() and run.test()")
            bodies.begin_evaluation(self)
            self._over = state.should_stop()
            if self._over:
                return None
            self._begun = True
            self._begin()
        else:
            self._end_iteration()
        self._over = state.should_stop()
        if self._over:
            bodies.abandon_evaluation()
            return None
        batch = self._feed.next(may_be_empty=state.ranks is not None)
        if batch is None:
            self._over = True
            self.metrics = self._end()
            return None
        self._begin_iteration(batch[0])
        return batch

    def leave(self) -> None:
        """End the evaluation early, without its ``after_x``; restore modes, gradients and weights."""
        self._over |= self._bodies.leave_evaluation(self)


def _raise(error: BaseException) -> None:
    raise error
