"""``IterTimerHook``: how long iterations take, and when it will be over."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from eventloop import (
    AfterTestIter,
    AfterTrainIter,
    AfterValIter,
    BeforeTestEpoch,
    BeforeTestIter,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeTrainIter,
    BeforeValEpoch,
    BeforeValIter,
    Hook,
    Priority,
    RunEvent,
    register,
)


@register
class IterTimerHook(Hook):
    """Measures every iteration on the host's clock.

    In training it reports ``data_time`` (from the end of the iteration before until the batch was there; hooks that run
    after this one and saves are in it), ``time`` (from one end to the next) and ``eta``, all in seconds, so they are in the
    outputs of ``after_train_iter`` and in ``run.info`` (``train/time``, ``train/data_time``, ``eta``). The ETA is the mean
    time since training began or was resumed, times the iterations left; there is none where their number is not known.

    In validation and test, what is reported becomes a metric, so there the running means are only left in ``run.info``
    (``val/time``, ``val/data_time`` and ``val/eta``, the seconds left of this validation); the logger adds them to its line.

    ``state_dict`` holds the iterations and seconds of training over all resumes; ``run.info["train/seconds"]`` tells them.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self.iters = 0
        """Training iterations measured, those before a resume included."""
        self.seconds = 0.0
        """What they took, in seconds."""
        self._session_iters = 0
        self._session_seconds = 0.0
        self._total: int | None = None
        self._last = 0.0
        self._data_time = 0.0
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

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        """Start the clock; what lies between epochs is no iteration's time."""
        self._total = event.run.total_iters
        self._last = perf_counter()

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        """Take the time that the batch took."""
        self._data_time = perf_counter() - self._last

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Take the time of the iteration and report."""
        now = perf_counter()
        time, self._last = now - self._last, now
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
        self._last = perf_counter()

    def before_test_epoch(self, event: BeforeTestEpoch) -> None:
        """Start a clock of its own."""
        self._pass = _Pass(event.run.evaluation_length)

    def before_test_iter(self, event: BeforeTestIter) -> None:
        """Take the time that the batch took."""
        self._pass.batch_is_here()

    def after_test_iter(self, event: AfterTestIter) -> None:
        """Take the time of the iteration."""
        self._pass.iteration_is_over(event)


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
