"""The iterators of a run. Objects, not generators: a generator cannot tell ``break`` from an exception in the loop's body.

They only say *when*; what is published, and in which order, is in :mod:`eventloop.training.state`.

Their end is a value within, not an exception: all code of the user's that runs in here may raise StopIteration by mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self

from eventloop.errors import TrainingError, stopped
from eventloop.events import Stage
from eventloop.log import get_logger
from eventloop.training.data import Feed
from eventloop.training.distributed.shares import Share
from eventloop.training.metrics import Metrics
from eventloop.training.state import Order

log = get_logger()


class Epochs:
    """Indices of the epochs that are left. A resumed run that was about to validate first yields the epoch before."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._pending_validation = order.counters.phase == "val"
        self._yielded = False
        self._begun_at: tuple[int, int, int] | None = None
        """The progress when an epoch was yielded that is to be trained."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        try:
            epoch = self._advance()
        except StopIteration as error:
            raise stopped(error, "code that run.epochs() called") from error
        if epoch is None:
            raise StopIteration
        self._yielded = True
        return epoch

    def _advance(self) -> int | None:
        """Return the index of the next epoch, or None at the end."""
        order = self._order
        order.abandon_evaluation()
        order.end_epoch()
        counters = order.counters
        if self._pending_validation:
            self._pending_validation = False
            order.begin_train()
            order.nothing_left = counters.batches == 0
            return counters.epoch if counters.batches else max(0, counters.epoch - 1)
        order.nothing_left = False
        order.settle()
        if order.should_stop():  # the phase stays: a save made now resumes with a validation that was cut off
            order.end_train()
            return None
        order.go_on()
        if self._done():
            if not self._yielded:
                self._tell_nothing_left()
                if order.resumed and not order.has_trained:  # the one that saved may have ended before its after_train
                    order.begin_train()
            order.end_train()
            return None
        reached = (counters.epoch, counters.iter, counters.batches)
        if reached == self._begun_at:
            raise TrainingError(
                f"epoch {counters.epoch + 1} has trained nothing, and run.epochs() would repeat it for ever: "
                "iterate over run.train(loader) in every epoch, in place of the loader itself"
            )
        order.begin_train()
        self._begun_at = reached
        return counters.epoch

    def _done(self) -> bool:
        counters = self._order.counters
        if counters.max_iters is not None:
            # A run that is resumed after its last iteration still has to end the epoch.
            return counters.iter >= counters.max_iters and not counters.batches
        return counters.max_epochs is not None and counters.epoch >= counters.max_epochs

    def _tell_nothing_left(self) -> None:
        done = self._order.counters
        limit = f"max_iters={done.max_iters}" if done.max_iters is not None else f"max_epochs={done.max_epochs}"
        log.warning(
            f"nothing is left to train: {limit} was reached before this run. Give a larger limit to go on, or make a new loop "
            "to begin again",
            epochs=done.epoch,
            iters=done.iter,
        )


class Batches:
    """Batches that know when the ``for`` statement over them ends, be it by ``break``, in whatever variable they are kept.

    In ``with run.train(loader) as batches:`` (or ``run.validate``) the end of the block counts instead.
    """

    _in_block = False
    _method: str
    """For errors, such as ``"run.train()"``."""

    def __iter__(self) -> Iterator[Any]:
        return self if self._in_block else _Body(self)

    def __next__(self) -> Any:
        try:
            batch = self._advance()
        except StopIteration as error:
            raise stopped(error, f"code that {self._method} called") from error
        if batch is None:
            raise StopIteration
        return batch[0]

    def _advance(self) -> tuple[Any] | None:
        """Return the next batch in a tuple (None may be a batch), or None at the end."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._in_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self._in_block = False
        self.leave()

    def leave(self) -> None:
        """End what the body has left open; without effect after the last batch."""
        raise NotImplementedError


class _Body(Iterator[Any]):
    """The iterator of one ``for`` statement, which alone holds it: Python deletes it where the statement ends."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._thread = threading.get_ident()

    def __next__(self) -> Any:
        return self._batches.__next__()

    def __del__(self) -> None:
        # In a cycle (a forgotten generator of the user's) it may be deleted anywhere. The next call of the run closes then.
        if self._thread == threading.get_ident():
            self._batches.leave()


class TrainBatches(Batches):
    """The batches of one training epoch. Left with ``break``, another ``for`` statement goes on with the batch after."""

    _method = "run.train()"

    def __init__(self, order: Order, feed: Feed, *, endless: bool) -> None:
        self._order = order
        self._feed = feed
        self._endless = endless
        self._begun = False
        self._over = order.nothing_left

    def __iter__(self) -> Iterator[Any]:
        if self._begun and not self._over:
            self._over = not self._order.go_on_in_epoch(self)
        return super().__iter__()

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        order = self._order
        if not self._begun and not order.should_stop():
            self._begun = True
            order.begin_epoch(self._feed, self, endless=self._endless)
        order.abandon_evaluation()
        order.end_iteration()
        if order.should_stop() and not self._complete():
            self._over = True
            order.break_epoch()
            return None
        batch = None if self._limit_reached() else self._next()
        if batch is None:
            self._over = True
            order.end_epoch()
            return None
        order.begin_iteration(batch[0])
        return batch

    def leave(self) -> None:
        """Note that the body was left. What that ends, ends with the next call of the run: an exception is to be told first."""
        self._order.leave_epoch(self)

    def _complete(self) -> bool:
        """True if the batch before was the last one, so that a stop now cuts nothing short."""
        return self._begun and (self._limit_reached() or (not self._endless and self._feed.last))

    def _limit_reached(self) -> bool:
        counters = self._order.counters
        return counters.max_iters is not None and counters.iter >= counters.max_iters

    def _next(self) -> tuple[Any] | None:
        batch = self._feed.next()
        if batch is None and self._endless:
            self._order.begin_pass(self._feed)
            batch = self._feed.next()
        return batch


class EvaluationBatches(Batches):
    """The batches of one validation or test; ``metrics`` holds the result when it is over."""

    def __init__(self, order: Order, feed: Feed, metrics: Metrics, stage: Stage) -> None:
        self._order = order
        self._feed = feed
        self._stage: Stage = stage
        self._method = "run.validate()" if stage == "val" else "run.test()"
        self._accumulated = metrics
        self._share: Share
        self._index = -1
        self._over = False
        self.metrics: Mapping[str, Any] = {}
        """Values by name; empty until the iterator is exhausted."""

    def _advance(self) -> tuple[Any] | None:
        if self._over:
            return None
        order, stage = self._order, self._stage
        if self._index < 0:
            order.close_training()
            if order.should_stop():
                self._over = True
                return None
            self._share = Share(self._feed.loader)
            order.begin_evaluation(stage, self, self._feed.length)
            order.scopes.defer(self._share.leave_out())
            self._accumulated.reset()
        else:
            samples = self._share.counts(self._index)
            order.end_evaluation_iteration(stage, self._index, self._accumulated, samples)
        if order.should_stop():
            self._over = True
            order.abandon_evaluation()
            return None
        batch = self._feed.next(may_be_empty=order.ranks is not None)
        if batch is None:
            self._over = True
            if order.ranks is not None and not any(order.ranks.gather(self._feed.used)):
                self._feed.check_not_empty()
            self._feed.end()
            self.metrics = self._accumulated.compute(order.ranks)
            order.end_evaluation(stage, self.metrics)
            return None
        self._index += 1
        order.begin_evaluation_iteration(stage, self._index, batch[0])
        return batch

    def leave(self) -> None:
        """End the evaluation where it is: without its ``after_x``, with modes, gradients and weights as they were before."""
        self._over |= self._order.leave_evaluation(self)
