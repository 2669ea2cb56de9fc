"""The iterators of a run: they call :class:`~trainbus.eventloop.training.driver.Driver` (pull).

They are objects, because a generator cannot tell ``break`` from an exception in the loop's body. Inside, a value instead of
StopIteration marks the end, because user code may raise StopIteration by mistake.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from sys import maxsize
from typing import Any, Final, Self

from trainbus.eventloop.errors import RunStopped, TrainingError, stopped
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.plain import numbers_in, plain
from trainbus.eventloop.training.body import Beginning, Marks
from trainbus.eventloop.training.data import Feed
from trainbus.eventloop.training.driver import Driver, EvaluationStage
from trainbus.eventloop.training.machine import EPOCH, ITERATION
from trainbus.eventloop.training.metrics import Metrics
from trainbus.eventloop.training.rng import get_rng_state, set_rng_state
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.user_errors import add_note

log = get_logger()


class OpenLoops:
    """Track the open ``for`` statements of the user's loop, for all iterators of a run; end the scopes that they left.

    A pass is one training epoch, validation or test in the body of ``run.epochs()``. ``place`` counts where passes begin and
    end in it: it is odd inside a pass. A resumed run enters the body at its top; until it comes to the ``goal``, the place
    where the save was taken, passes yield nothing. There the states of the save are put back.
    """

    def __init__(self, drive: Driver, run: SavedRun) -> None:
        self.drive = drive
        self.run = run
        self.machine = drive.state.machine
        self.owned: bool = not run.host.facts.update_steps
        """True if the body of an epoch is the user's; False for that of a ``TrainLoop``."""
        drive.state.leave_by(self.end_left_iteration)
        self.forget()

    def forget(self) -> None:
        """Drop all references to the loaders."""
        self.training: TrainBatches | None = None
        """The iterator whose epoch is open."""
        self.evaluating: object | None = None
        self.drive.epoch_ends = None
        self.place = self.goal = 0
        self.trainings = 0
        """Passes of the training in the present body."""
        self.nests = False
        """True once a validation has run in the body of an iteration, before its step."""
        self.drive.returns.forget()
        self._marks: Marks | None = None  # of the weights that the last pass of the training left
        self.open_epochs = False
        """True while ``run.epochs()`` has not ended."""
        self._large: set[str] = set()  # stateful objects that are too large to copy them in each epoch
        self._again = ""  # what was told of the epoch that was entered again

    # ------------------------------------------------------------------------------------------------------------ bodies

    def enter_body(self) -> int:
        """Begin the body of the next epoch; return its index."""
        state, counters = self.drive.state, self.drive.state.counters
        self.place = self.trainings = 0
        keeps = self.owned and self.run.checkpointer.directories
        state.begin_body(Beginning.of(self.run, self._large) if keeps else None, own=self.owned)
        self._mark()
        state.set_progress()
        return counters.epoch

    def _mark(self) -> None:
        self._marks = Marks(self.run.models.values()) if self.owned and self.run.checkpointer.directories else None

    @property
    def stop_waits(self) -> bool:
        """True if code of the body has changed the weights, perhaps for a validation: a stop waits until it has ended."""
        return self._marks is not None and self.drive.state.holds and not self._marks.hold

    @property
    def in_body(self) -> bool:
        """True if the run was saved, or left, in the body of an epoch."""
        return _open_body(self.drive.state.counters)[1] > 0

    def enter_again(self) -> int:
        """Enter the body in which the resumed run was saved; return the index of the epoch."""
        state, counters = self.drive.state, self.drive.state.counters
        epoch, goal = _open_body(counters)
        self.place, self.goal, self.trainings = 0, goal, 0
        if not self.owned:
            return epoch
        state.enter_body(epoch, goal)
        self.drive.returns.begin(self.run)
        if state.beginning is None:
            state.begin_with(Beginning.of(self.run, self._large))
        state.set_progress()
        self._tell_again(epoch)
        return epoch

    def _tell_again(self, epoch: int) -> None:
        counters = self.drive.state.counters
        if self.goal == 1 and not counters.batches:
            return  # saved in the first validation of the body: all of it comes again
        done = f"its first {counters.batches} batches" if counters.batches else "its batches"
        self._again = (
            f"this resumed run has entered epoch {epoch} again at the top of its body, without {done}, which the saved run has "
            "trained: what the body collects over batches lacks these; keep such values in stateful=, or guard the code"
        )
        if self.drive.returns.in_batch and self.drive.state.batch_rng is None:
            self._again += "; random numbers that its first body draws before its validation are others"
        log.warning(self._again, id="epoch-entered-again", epoch=epoch, batches=counters.batches)

    def note(self, error: BaseException) -> None:
        """Add to an error in the body of an epoch that was entered again, or of a name without a value, why it may be there."""
        if self._again:
            add_note(error, self._again)
        elif isinstance(error, NameError) and self.owned and self.drive.state.resumed:
            add_note(
                error,
                "this run was resumed: a variable that code of an earlier epoch has set is not in the checkpoint; set it "
                "before the loop, or keep it with run.keep() or stateful=",
            )

    def end_body(self) -> None:
        """End the body of an epoch, if one is open: what was requested behind its batches is saved here."""
        state, counters = self.drive.state, self.drive.state.counters
        if not state.holds:
            return
        self._arrive()
        self._again = ""
        ended = not counters.batches  # else its training was left in the middle
        state.leave_body(ended=ended)
        if ended:
            state.go_on()
        self.drive.save_held(force=True)

    # ------------------------------------------------------------------------------------------------------------ passes

    def finds_done(self) -> bool:
        """Begin a pass; return True if the saved run has finished it: then this one yields nothing."""
        self.place += 1
        if self.place < self.goal:
            return True
        if self.drive.state.holds and self.place > self.goal:
            self.drive.state.counters.reach(self.place)
        return False

    def end_pass(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End a pass."""
        self.place += 1
        if self.place == self.goal:
            self._arrive()
        elif self.place > self.goal and self.drive.state.holds:
            self.drive.state.counters.reach(self.place)
            self.drive.state.finished.append(plain(numbers_in(metrics or {})))

    def arrive(self) -> None:
        """Put back the states of the save if this is its place."""
        if self.place == self.goal:
            self._arrive()

    def _arrive(self) -> None:
        self.goal = 0
        self.drive.returns.arrive(self.run)
        self._mark()

    def begin_batch(self) -> None:
        """Note the random states at the beginning of a batch's body, if validations come in it."""
        state = self.drive.state
        if self.drive.returns.in_batch:
            self.drive.returns.begin_batch(self.run)
        elif self.nests or not state.counters.batches:
            state.draw_batch_from(get_rng_state() if self.owned and self.run.checkpointer.directories else None)
        elif state.batch_rng is not None:
            state.draw_batch_from(None)

    def stop(self) -> None:
        """End the run here, by an exception: the code of a body that a stop cuts short must not go on.

        In a ``TrainLoop``, iterators end instead.
        """
        state = self.drive.state
        if self.owned and state.machine.is_open:
            self.drive.returns.reach_batch(self.run)
            self.drive.returns.arrive(self.run)  # if it has not come to the place of its save
            state.leave_body()
            raise RunStopped(state.why_stopped())

    def batches_before(self) -> int:
        """Return the batches of the next training pass that the saved run has trained."""
        counters = self.drive.state.counters
        if self.owned and self.drive.state.holds:
            return counters.batches if self.place + 1 == self.goal else 0
        return counters.batches if self.drive.state.resumed else 0

    # ------------------------------------------------------------------------------------------------------------ scopes

    def begin_train(self) -> None:
        """Begin the training if it has not begun."""
        if not self.drive.state.training:
            self.drive.state.check_open("run.epochs() and run.train()")
            self.drive.state.wait_for_calls(waits=False)
            self.drive.begin_train()
        self.drive.asks = True

    @property
    def left(self) -> bool:
        """True if the ``for`` statement over the open epoch was left, by ``break`` or a shorter iterator around it."""
        return self.training is not None and self.training.left

    def end_left(self) -> None:
        """End the epoch if its ``for`` statement was left."""
        if self.left:
            self.end_epoch()

    def end_left_iteration(self) -> None:
        """End an open iteration if its ``for`` statement was left."""
        if self.training is not None and self.training.left:  # before each step
            self.end_iteration()

    def end_iteration(self) -> None:
        """End an open iteration whose body was left: as any other if it has stepped."""
        self.abandon_evaluation()
        if ITERATION in self.machine:
            self.drive.leave_iteration()

    def end_epoch(self, *, cut: bool = False) -> None:
        """End the open epoch, if any, and an iteration that ``break`` left open."""
        if EPOCH in self.machine:
            self.end_iteration()
            self.drive.end_epoch(cut=cut)
            self._warn_without_update()
            self.end_pass()
            self._mark()
        self._no_epoch()

    def _warn_without_update(self) -> None:
        state = self.drive.state
        if state.trains and state.counters.epoch == 1 and not state.counters.update:
            log.warning(
                "no optimizer has stepped in the first epoch, so averages and schedules did nothing: call optimizer.step(), "
                "and give the run the optimizer that steps",
                id="no-optimizer-step",
            )

    def abandon_evaluation(self) -> None:
        """End a validation or test early if one is open, after ``break`` or a stop."""
        passes = self.evaluating is not None and self.owned and self.drive.state.interrupted is None
        self.evaluating = None
        if self.machine.evaluates:
            self.drive.drop_evaluation()
            if passes:
                self.end_pass()

    def abandon_epoch(self) -> None:
        """End the open epoch early, if any."""
        self._no_epoch()
        if EPOCH in self.machine:
            self.drive.abandon_epoch()

    def _no_epoch(self) -> None:
        self.training, self.drive.epoch_ends = None, None

    def end_train(self) -> None:
        """End the training if it has begun."""
        if self.drive.state.training:
            self.drive.end_train()

    def leave(self, *, cut: bool) -> None:
        """End all scopes where the block of the run ends: the user's code has left them, or a stop has ``cut`` them short."""
        if not cut:
            if self.open_epochs:
                self.run.info[LEFT] = True
            self.end_iteration()
        self.drive.drop_evaluation()
        self.abandon_epoch()
        if not cut:
            self.end_body()
        self.drive.state.leave_body()
        self.end_train()


def _open_body(counters: Any) -> tuple[int, int]:
    """Return the epoch in whose body a run was saved, and the place in it; 0 if in none.

    Calls, a ``TrainLoop`` and 0.2 save no body: the phase and the number of batches tell.
    """
    if counters.body is not None:
        return counters.body, counters.place
    if counters.batches:
        return counters.epoch, 1
    return (counters.epoch - 1, 2) if counters.phase == "val" and counters.epoch else (counters.epoch, 0)


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


LEFT: Final = "left_by_break"
"""Key of ``run.info`` in a checkpoint: the loop over ``run.epochs()`` was left by ``break``."""


class Epochs(_Steps):
    """Yield the indices of the remaining epochs. A run that was saved in the body of one begins with that one."""

    _method = "run.epochs()"

    def __init__(self, loops: OpenLoops) -> None:
        self._loops = loops
        self._state = loops.drive.state
        self._first = True
        self._yielded = False
        self._iter = self._state.counters.iter
        self._begun_at: tuple[int, int, int] | None = None
        """The progress when the last epoch to train was yielded."""

    def __iter__(self) -> Self:
        return self

    def _advance(self) -> tuple[int] | None:
        epoch = self._next()
        self._loops.open_epochs = epoch is not None
        return epoch

    def _next(self) -> tuple[int] | None:
        loops, state, counters = self._loops, self._state, self._state.counters
        if loops.run.info.pop(LEFT, None) and self._first:
            log.warning(
                f"the saved run has left the loop over run.epochs() by `break` after epoch {counters.epoch}, and this run "
                "trains on; if that was the end, keep it: kept = run.keep(done=False), set kept.done before `break`, and test "
                "it first",
                id="saved-run-left-by-break",
            )
        loops.abandon_evaluation()
        loops.end_epoch()
        loops.end_body()
        first, self._first = self._first, False
        if first and not counters.batches and loops.in_body:  # even if it stops: it begins the training
            loops.begin_train()
            return self._yield(loops.enter_again())
        state.collect_requests()
        if state.should_stop():  # keep the phase, so that a resume repeats an interrupted validation
            loops.end_train()
            return None
        if self._done():
            state.go_on()
            if state.resumed and not self._yielded and not state.has_trained:
                loops.begin_train()  # the saved run may have ended before after_train
            loops.end_train()
            return None
        loops.begin_train()
        if first and loops.in_body:
            return self._yield(loops.enter_again())
        state.go_on()
        if counters.go_on_behind_limit():
            return self._yield(loops.enter_again())
        reached = (counters.epoch, counters.iter, counters.batches)
        if reached == self._begun_at:
            raise TrainingError(
                f"epoch {counters.epoch + 1} has trained nothing, and run.epochs() would repeat it forever: iterate over "
                "run.train(loader) instead of the loader in every epoch"
            )
        self._begun_at = reached
        return self._yield(loops.enter_body())

    def _yield(self, epoch: int) -> tuple[int]:
        self._yielded = True
        return (epoch,)

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
                id="nothing-left-to-train",
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
    """Batches for one ``for`` statement, or for the block ``with run.train(loader) as batches:`` (or ``run.validate``)."""

    _loader: Any
    _in_block = False
    _statement: weakref.ref[_Body] | None = None  # of the last `for` statement: alive as long as that has its iterator

    def __iter__(self) -> Iterator[Any]:
        return self if self._in_block else self._begin_statement()

    def __len__(self) -> int:
        """Return the length of the loader: the batches of a whole epoch, also in one that a resumed run enters again."""
        return len(self._loader)

    @property
    def dataset(self) -> Any:
        """The dataset of the loader."""
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        """The sampler of the loader."""
        return self._loader.sampler

    def _begin_statement(self) -> _Body:
        body = _Body(self)
        self._statement = weakref.ref(body)  # which each step asks, in C
        weakref.finalize(body, self._end_statement, threading.get_ident()).atexit = False
        return body

    def _end_statement(self, thread: int) -> None:
        """A ``for`` statement that began on this thread has ended."""

    @property
    def left(self) -> bool:
        """True if the ``for`` statement or the block has ended."""
        return not self._in_block and self._statement is not None and self._statement() is None

    def __enter__(self) -> Self:
        self._in_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self._in_block = False
        self._begin_statement()  # which ends at once


class _Body(_Steps):
    """The iterator of one ``for`` statement. Only the statement refers to it, so it is gone at the statement's end."""

    def __init__(self, batches: Batches) -> None:
        self._advance = batches._advance
        self._method = batches._method

    def __iter__(self) -> Self:
        return self


class TrainBatches(Batches):
    """Yield the batches of one training epoch. After ``break``, another ``for`` statement continues with the next batch."""

    _method = "run.train()"

    def __init__(self, loops: OpenLoops, loader: Iterable[Any], *, endless: bool, accumulate: int | None) -> None:
        self._loops = loops
        self._drive = loops.drive
        self._loader = loader
        self._feed: Feed
        self._endless, self._accumulate = endless, accumulate
        self._begun = self._over = False
        self._start: int | None = None

    @property
    def start(self) -> int:
        """Batches of this epoch that were trained before: 0, or more in an epoch that a resumed run enters again.

        ``enumerate(batches, start=batches.start)`` numbers batches as in a run that was never stopped.
        """
        return self._loops.batches_before() if self._start is None else self._start

    def __len__(self) -> int:
        if self._endless:
            raise TypeError("run.train(loader, endless=True) has no length: it begins the loader anew until the training ends")
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        loops = self._loops
        if self._begun and not self._over:
            self._over = loops.training is not self  # its epoch has ended since
            if not self._over and self.left:
                loops.end_iteration()
        return super().__iter__()

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        loops, drive = self._loops, self._drive
        state, counters = drive.state, drive.state.counters
        ended = False
        if self._begun:
            if state.interrupted is not None:
                loops.abandon_evaluation()
            if state.machine.innermost is ITERATION:
                drive.end_iteration()  # handles requests
                ended = True
            elif loops.evaluating is not None:
                loops.abandon_evaluation()
        elif not self._begin():
            return None
        if (plan := state.plan) is not None and ended and (plan.comes_next or (plan.asked and not state.window_open)):
            plan.validate()
            ended = False
        limited = counters.max_iters is not None and counters.iter >= counters.max_iters
        complete = limited or (loops.drive.epoch_ends is True and not state.window_open)
        stops = (state.urgent or not ended) and state.should_stop()
        if stops and not (complete or self._feed.last):  # else it cuts nothing short
            self._over = True
            loops.abandon_epoch()
            loops.stop()
            return None
        whole = complete and self._feed.last
        batch = None if complete and not whole else self._feed.next()  # at its end, a sampler may draw once more
        if complete or batch is None:
            self._over = True
            loops.end_epoch(cut=limited and not whole and loops.drive.epoch_ends is not True)
            return None
        if loops.owned:
            loops.begin_batch()
        drive.begin_iteration(batch[0])
        return batch

    def _begin(self) -> bool:
        """Begin the epoch, and end one that was left; return False if there is nothing to train."""
        loops, drive = self._loops, self._drive
        state = drive.state
        self._begun = True
        loops.begin_train()
        if loops.training is not None and not loops.left:
            raise TrainingError(
                "run.train() begins in the body of another run.train(): iterate over the inner loader itself, or first end the "
                "outer epoch by `break` out of its `for` statement"
            )
        loops.abandon_evaluation()
        loops.end_epoch()
        self._start, index = self.start, loops.trainings
        loops.trainings += 1
        if loops.finds_done():
            loops.run.feeds.pass_over(self._loader, index)
            loops.end_pass()
            self._over = True
            return False
        reached, limit = loops.place == loops.goal, state.counters.max_iters
        if limit is not None and state.counters.iter >= limit and not state.counters.batches:
            loops.end_pass()
            self._over = True
            return False
        if state.should_stop():
            self._over = True
            loops.stop()
            return False
        if loops.owned:
            state.go_on()
            loops.arrive()
            if loops.place > 1:
                drive.save_held(force=True)  # what waits behind an earlier pass of this body: now the weights change
            state.counters.stay_in_body()
        self._feed = loops.run.feeds.for_training(self._loader, index)
        loops.training = self
        loops.drive.epoch_ends = None if self._endless else False
        drive.accumulate = self._accumulate or 1
        rng = get_rng_state() if reached and loops.owned and self._feed.resuming and self._feed.used else None
        drive.begin_epoch(self._feed, endless=self._endless)
        if rng is not None:
            set_rng_state(rng)
        return True


class TrainIterations(TrainBatches):
    """Yield the indices of the remaining iterations of a training without a loader: one epoch, as long as the training."""

    _method = "run.iterations()"

    def __init__(self, loops: OpenLoops, *, accumulate: int | None) -> None:
        super().__init__(loops, range(maxsize), endless=True, accumulate=accumulate)
        self._epochs = Epochs(loops)
        self._entered = False

    def __len__(self) -> int:
        """Return the number of iterations of the whole training."""
        return int(self._drive.state.counters.max_iters or 0)

    def _advance(self) -> tuple[int] | None:
        if self._over:
            return None
        if not self._entered:
            self._entered = True
            if self._epochs._advance() is None:  # all are done
                self._over = True
                return None
        if super()._advance() is not None:
            return (self._drive.state.counters.iter,)
        self._epochs._advance()  # ends the training
        return None


class EvaluationBatches(Batches):
    """Yield the batches of one validation or test; afterwards ``metrics`` holds the result."""

    def __init__(self, loops: OpenLoops, feed: Feed, metrics: Metrics, stage: EvaluationStage) -> None:
        self._loops = loops
        self._feed, self._loader = feed, feed.loader
        self._validates = stage == "val"
        self._method = "run.validate()" if self._validates else "run.test()"
        self._start = partial(loops.drive.begin_evaluation, stage, feed, metrics)
        self._begun = False
        self._over = False
        self._stop_waits = False
        self.metrics: Mapping[str, Any] = {}
        """Values by name; empty until the iterator is exhausted."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.leave()

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        loops, drive, state = self._loops, self._loops.drive, self._loops.drive.state
        if self._begun:
            drive.end_evaluation_iteration()
        elif not self._begin():
            self._over = True
            return None
        if state.interrupted is None and not self._stop_waits and state.should_stop():
            self._over = True
            loops.evaluating = None
            drive.drop_evaluation()
            loops.stop()
            return None
        batch = self._feed.next(may_be_empty=state.coordinator.size > 1)
        if batch is None:
            self._over = True
            nested = state.interrupted is not None
            self.metrics = drive.end_evaluation()
            loops.evaluating = None
            if loops.owned and not nested:
                loops.end_pass(self.metrics)
            return None
        drive.begin_evaluation_iteration(batch[0])
        return batch

    def _begin(self) -> bool:
        """Begin the evaluation; return False if there is none."""
        loops, state = self._loops, self._loops.drive.state
        state.check_open("run.validate() and run.test()")
        loops.abandon_evaluation()
        loops.end_left()
        nested = ITERATION in loops.machine
        if nested:
            loops.nests |= not state.stepped
            loops.drive.returns.reach_batch(loops.run)
        elif loops.owned:
            if loops.finds_done():
                index = (loops.place - 1) // 2
                self.metrics = state.finished[index] if index < len(state.finished) else {}
                loops.end_pass()
                return False
            if self._validates and state.training:
                state.validate_next()
            loops.arrive()
        self._stop_waits = not nested and loops.stop_waits
        if not nested and not self._stop_waits and state.should_stop():
            loops.stop()
            return False
        self._begun, loops.evaluating = True, self
        self._start()
        return True

    def _end_statement(self, thread: int) -> None:
        # At once, because the modes of the model must be right from here on. The garbage collector may call this on another
        # thread; then the next call of the run ends the scopes.
        if thread == threading.get_ident():
            self.leave()

    def leave(self) -> None:
        """End the evaluation early, without its ``after_x``; restore modes, gradients and weights."""
        if self._loops.evaluating is self:
            self._over = True
            try:
                self._loops.abandon_evaluation()
            except BaseException as error:  # noqa: BLE001 - a finalizer cannot raise: the end of the enclosing scope does
                self._loops.machine.defer(partial(_raise, error))


def _raise(error: BaseException) -> None:
    raise error
