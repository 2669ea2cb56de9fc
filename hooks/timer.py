"""``IterTimerHook``: how long iterations take, when it will be over, and in the end what the time went into."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any

from eventloop import Hook, Priority, check_options, get_logger, mount, register
from eventloop.events import (
    AfterTestIter,
    AfterTrain,
    AfterTrainIter,
    AfterValIter,
    BeforeTestEpoch,
    BeforeTestIter,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeTrainIter,
    BeforeVal,
    BeforeValEpoch,
    BeforeValIter,
    RunEvent,
)
from hooks.logger import LOGGER
from hooks.options import NonNegativeInt

log = get_logger()

# The optimizer's update is a subscriber at HIGH; what comes after it is the time of hooks.
_AFTER_UPDATE = int(Priority.HIGH) + 1


@register
class IterTimerHook(Hook):
    """Measures every iteration on the host's clock.

    In training it reports ``data_time`` (from the end of the iteration before until the batch was there; hooks that run
    after this one and saves are in it), ``time`` (from one end to the next) and ``eta``, all in seconds, so they are in the
    outputs of ``after_train_iter`` and in ``run.info`` (``train/time``, ``train/data_time``, ``eta``). The ETA is the mean
    time since training began or was resumed, times the iterations left; there is none where their number is not known.

    In validation and test, what is reported becomes a metric, so there the running means are only left in ``run.info``
    (``val/time``, ``val/data_time`` and ``val/eta``, the seconds left of this validation); the logger adds them to its line.

    When training has ended in order, a summary is logged (below the last line of a ``LoggerHook``): how long it took in all,
    how long the validations took, and the mean time of an iteration. Of the time outside of validations it tells the share of
    *data* (waiting for the batch, and staging of checkpoints) and of *hooks*: what is called around the step (after
    ``before_train_iter`` and after the update) and all that happens between epochs. The rest is the step itself. The same is
    in ``run.info``: ``train/mean_time`` in seconds, ``train/data_share`` and ``train/hooks_share`` between 0 and 1.

    ``state_dict`` holds the iterations and seconds of training over all resumes; ``run.info["train/seconds"]`` tells them.

    Args:
        warmup_iter: iterations after the begin (or a resume) that the summary's means and shares leave out: the first ones
            are slower than the rest.

    Raises:
        ConfigurationError: a negative number.
    """

    priority = Priority.NORMAL
    observes = True

    @check_options
    def __init__(self, warmup_iter: NonNegativeInt = 0) -> None:
        self.warmup_iter = warmup_iter
        self.iters = 0
        """Training iterations measured, those before a resume included."""
        self.seconds = 0.0
        """What they took, in seconds."""
        self._session_iters = 0
        self._session_seconds = 0.0
        self._total: int | None = None
        self._last = 0.0
        self._data_time = 0.0
        self._marks = _Marks()
        self._began = 0.0
        self._pass = _Pass()

    def state_dict(self) -> dict[str, Any]:
        """Return the iterations and seconds of training so far."""
        return {"iters": self.iters, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self.iters = int(state["iters"])
        self.seconds = float(state["seconds"])

    def before_train(self, event: BeforeTrain) -> None:
        """Forget the mean of an earlier session: a resumed run may be on another machine."""
        self._session_iters = 0
        self._session_seconds = 0.0
        self._marks = _Marks()
        self._began = self._last = perf_counter()

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        """Start the clock; what lies between epochs is no iteration's time."""
        self._total = event.run.total_iters
        self._between()

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        """Take the time that the batch took."""
        now = perf_counter()
        self._data_time = now - self._last
        self._marks.batch = now

    @mount("before_train_iter", priority=Priority.LOWEST)
    def step_begins(self, event: BeforeTrainIter) -> None:
        """Note that the user's step comes next."""
        self._marks.step = perf_counter()

    @mount("after_train_iter", priority=_AFTER_UPDATE)
    def step_ends(self, event: AfterTrainIter) -> None:
        """Note that the weights are new."""
        self._marks.updated = perf_counter()

    @mount("after_train_iter", priority=Priority.LOWEST)
    def hooks_end(self, event: AfterTrainIter) -> None:
        """Note that all hooks have had their turn."""
        self._marks.hooks_done = perf_counter()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Take the time of the iteration and report."""
        now = perf_counter()
        time, self._last = now - self._last, now
        if self._session_iters >= self.warmup_iter:
            self._marks.count(time)
        self.iters += 1
        self.seconds += time
        self._session_iters += 1
        self._session_seconds += time
        run, data_time = event.run, self._data_time
        info = run.info
        info["train/time"] = time
        info["train/data_time"] = data_time
        info["train/seconds"] = self.seconds
        if self._total is None:
            run.report(time=time, data_time=data_time)
            return
        eta = self._session_seconds / self._session_iters * (self._total - event.progress.iter - 1)
        info["eta"] = eta
        run.report(time=time, data_time=data_time, eta=eta)

    def after_train(self, event: AfterTrain) -> None:
        """Log the summary."""
        self._between()
        marks, info = self._marks, event.run.info
        facts: dict[str, Any] = {"total": _rounded(self._last - self._began), "iters": self._session_iters}
        if marks.validations:
            facts["validation"] = _rounded(marks.validations)
        if marks.iters:
            mean, data, hooks = marks.summary()
            info["train/mean_time"], info["train/data_share"], info["train/hooks_share"] = mean, data, hooks
            facts |= {"seconds_per_iter": round(mean, 6), "data": f"{data:.1%}", "hooks": f"{hooks:.1%}"}
        else:
            facts["warmup"] = self.warmup_iter
        logger = event.run.shared.get(LOGGER)
        if logger is not None:
            logger.tell(event.run, "training took", **facts)
        else:
            log.info("training took", **facts)

    def before_val(self, event: BeforeVal) -> None:
        """Start the clock of the whole validation."""
        self._between()

    def before_val_epoch(self, event: BeforeValEpoch) -> None:
        """Start a clock of its own."""
        self._pass = _Pass(event.run.evaluation_length)

    def before_val_iter(self, event: BeforeValIter) -> None:
        """Take the time that the batch took."""
        self._pass.batch_is_here()

    def after_val_iter(self, event: AfterValIter) -> None:
        """Take the time of the iteration."""
        self._pass.iteration_is_over(event)

    def after_val(self, event: RunEvent) -> None:
        """Go on with training: a validation in the middle of an epoch is no iteration's time."""
        began, self._last = self._last, perf_counter()
        self._marks.validations += self._last - began
        self._marks.hooks_done = self._last

    def before_test_epoch(self, event: BeforeTestEpoch) -> None:
        """Start a clock of its own."""
        self._pass = _Pass(event.run.evaluation_length)

    def before_test_iter(self, event: BeforeTestIter) -> None:
        """Take the time that the batch took."""
        self._pass.batch_is_here()

    def after_test_iter(self, event: AfterTestIter) -> None:
        """Take the time of the iteration."""
        self._pass.iteration_is_over(event)

    def _between(self) -> None:
        """Count what has happened since the last iteration or validation as the time of hooks."""
        now = perf_counter()
        if self._session_iters >= self.warmup_iter:
            self._marks.between += now - self._last
        self._last = self._marks.hooks_done = now


class _Marks:
    """Moments of the iteration under way on the host's clock, and the sums over the iterations that count."""

    def __init__(self) -> None:
        self.hooks_done = 0.0
        self.batch = 0.0
        self.step = 0.0
        self.updated = 0.0
        self.iters = 0
        self.between = 0.0
        self.validations = 0.0
        self._seconds = 0.0
        self._data = 0.0
        self._step = 0.0

    def count(self, time: float) -> None:
        self.iters += 1
        self._seconds += time
        self._data += self.batch - self.hooks_done
        self._step += self.updated - self.step

    def summary(self) -> tuple[float, float, float]:
        """Return the mean seconds of an iteration, and the shares of data and hooks in the time outside of validations."""
        total = self._seconds + self.between
        return self._seconds / self.iters, self._data / total, (total - self._data - self._step) / total


def _rounded(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds, 1)))


class _Pass:
    """The clock of one pass over validation or test data.

    Args:
        length: batches in it, where known.
    """

    def __init__(self, length: int | None = None) -> None:
        self._length = length
        self._start = self._last = perf_counter()
        self._data_seconds = 0.0

    def batch_is_here(self) -> None:
        self._data_seconds += perf_counter() - self._last

    def iteration_is_over(self, event: AfterValIter | AfterTestIter) -> None:
        self._last = perf_counter()
        done = event.batch_idx + 1
        mean = (self._last - self._start) / done
        info, stage = event.run.info, event.progress.stage
        info[f"{stage}/time"] = mean
        info[f"{stage}/data_time"] = self._data_seconds / done
        if self._length is not None:
            info[f"{stage}/eta"] = mean * (self._length - done)
