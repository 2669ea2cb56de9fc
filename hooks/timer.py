"""``IterTimerHook``: measure iterations, estimate the time left, and log a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from trainbus.eventloop import Hook, Priority, check_options, events, get_logger, mount
from trainbus.eventloop.events import AfterTrainIter, BeforeTrainIter
from trainbus.eventloop.registry import register
from trainbus.eventloop.seams import CLOCK
from trainbus.hooks.logger import LOGGER
from trainbus.hooks.options import NonNegativeInt

log = get_logger()

# The update is a subscriber at HIGH; later time counts as the time of hooks.
_AFTER_UPDATE = int(Priority.HIGH) + 1


@register
class IterTimerHook(Hook):
    """Measure every iteration on the host's clock, in seconds.

    In training the hook reports ``time``, from the end of one iteration to the next; ``data_time``, the part until the batch
    arrives, including late hooks and saves; and ``eta``, the mean time since training began or was resumed, times the
    iterations left (if their number is known). ``run.info`` has them as ``train/time``, ``train/data_time`` and ``eta``, and
    ``train/seconds`` over all resumes. The logger adds the running means of validations and tests to its line. They are only in
    ``run.info`` (``val/time``, ``val/data_time``, and ``val/eta`` of this validation), because a reported value would become a
    metric.

    When training ends without an exception, the hook logs a summary below the last line of a ``LoggerHook``: the total time,
    the time of validations, and the mean time of an iteration. It splits the time outside of validations into *data* (waiting
    for batches, and staging of checkpoints), *hooks* (handlers around the step, and everything between epochs) and the step.
    ``run.info`` has these as ``train/mean_time``, ``train/data_share``, ``train/hooks_share``.

    Args:
        warmup_iter: number of slower first iterations (also after a resume) that the summary leaves out.
    """

    priority = Priority.NORMAL
    observes = True

    @check_options
    def __init__(self, warmup_iter: NonNegativeInt = 0) -> None:
        self.warmup_iter = warmup_iter
        self.iters = 0
        """Number of measured training iterations, including those before a resume."""
        self.seconds = 0.0
        """Total time of these iterations, in seconds."""
        self._total: int | None = None
        self._training = _Training(warmup_iter)
        # Of the present validation or test: its length in batches, its clock, and the seconds of waiting for data.
        self._length: int | None = None
        self._began = self._last = self._data_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"iters": self.iters, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iters = int(state["iters"])
        self.seconds = float(state["seconds"])

    def before_train(self, event: events.BeforeTrain) -> None:
        self._training = _Training(self.warmup_iter)  # a resumed run may be on another machine

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        self._total = event.run.data.total_iters
        self._training.gap_ends()

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        self._training.batch = CLOCK.value()

    @mount("before_train_iter", priority=Priority.LOWEST)
    def step_begins(self, event: BeforeTrainIter) -> None:
        self._training.step = CLOCK.value()

    @mount("after_train_iter", priority=_AFTER_UPDATE)
    def step_ends(self, event: AfterTrainIter) -> None:
        self._training.updated = CLOCK.value()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        training, info = self._training, event.run.info
        data_time = training.batch - training.last
        time = training.iteration_ends()
        self.iters += 1
        self.seconds += time
        info["train/time"] = time
        info["train/data_time"] = data_time
        info["train/seconds"] = self.seconds
        times = {"time": time, "data_time": data_time}
        if self._total is not None:
            times["eta"] = info["eta"] = training.seconds / training.iters * (self._total - event.progress.iter - 1)
        event.run.report(**times)

    @mount("after_train_iter", priority=Priority.LOWEST)
    def hooks_end(self, event: AfterTrainIter) -> None:
        self._training.hooks_done = CLOCK.value()

    def after_train(self, event: events.AfterTrain) -> None:
        training, info = self._training, event.run.info
        training.gap_ends()
        facts: dict[str, Any] = {"total": _rounded(training.last - training.began), "iters": training.iters}
        if training.validations:
            facts["validation"] = _rounded(training.validations)
        if training.counted:
            total = training.counted_seconds + training.gaps  # outside of validations
            mean, data = training.counted_seconds / training.counted, training.data / total
            hooks = 1 - data - training.step_seconds / total
            info.update({"train/mean_time": mean, "train/data_share": data, "train/hooks_share": hooks})
            facts |= {"seconds_per_iter": round(mean, 6), "data": f"{data:.1%}", "hooks": f"{hooks:.1%}"}
        else:
            facts["warmup"] = self.warmup_iter
        logger = event.run.shared.get(LOGGER)
        write = log.info if logger is None else partial(logger.log_line, event.run)
        write("training took", **facts)

    def before_val(self, event: events.BeforeVal) -> None:
        self._training.gap_ends()

    def after_val(self, event: events.AfterVal) -> None:
        self._training.gap_ends(validation=True)

    @mount("before_val_epoch", "before_test_epoch")
    def pass_begins(self, event: events.BeforeValEpoch | events.BeforeTestEpoch) -> None:
        self._length = event.run.data.evaluation_length
        self._began = self._last = CLOCK.value()
        self._data_seconds = 0.0

    @mount("before_val_iter", "before_test_iter")
    def batch_arrives(self, event: events.BeforeValIter | events.BeforeTestIter) -> None:
        self._data_seconds += CLOCK.value() - self._last

    @mount("after_val_iter", "after_test_iter")
    def iteration_ends(self, event: events.AfterValIter | events.AfterTestIter) -> None:
        done, self._last = event.batch_idx + 1, CLOCK.value()
        mean = (self._last - self._began) / done
        info, stage = event.run.info, event.progress.stage
        info[f"{stage}/time"] = mean
        info[f"{stage}/data_time"] = self._data_seconds / done
        if self._length is not None:
            info[f"{stage}/eta"] = mean * (self._length - done)


class _Training:
    """Clock of a training since its begin or resume; the summary leaves out the first ``warmup`` iterations."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        # Times of the present iteration.
        self.began = self.last = self.hooks_done = self.batch = self.step = self.updated = CLOCK.value()
        self.iters, self.seconds, self.validations = 0, 0.0, 0.0
        # Sums over the iterations that count, and over the gaps between iterations.
        self.counted = 0
        self.counted_seconds = self.data = self.step_seconds = self.gaps = 0.0

    def iteration_ends(self) -> float:
        """Return the seconds since the last iteration, validation or gap ended."""
        now = CLOCK.value()
        time, self.last = now - self.last, now
        if self.iters >= self._warmup:
            self.counted += 1
            self.counted_seconds += time
            self.data += self.batch - self.hooks_done
            self.step_seconds += self.updated - self.step
        self.iters += 1
        self.seconds += time
        return time

    def gap_ends(self, *, validation: bool = False) -> None:
        """Count the time since the last iteration or gap as the time of hooks or of a validation, not of an iteration."""
        now = CLOCK.value()
        if validation:
            self.validations += now - self.last
        elif self.iters >= self._warmup:
            self.gaps += now - self.last
        self.last = self.hooks_done = now


def _rounded(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds, 1)))
