"""``LatestHook``: keep the latest values of a run, for code that polls them, such as a scrape of ``/metrics``."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from eventloop.bus import Hook, Priority, mount
from eventloop.events import (
    AfterRun,
    AfterTestEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeVal,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    OnException,
    Progress,
    RunPaused,
    RunResumed,
)
from eventloop.observe.story import ENDED, RunState

_WINDOW: Final = 10  # samples that the throughput is measured over; one a second, or one an iteration if that takes longer


class Sample(NamedTuple):
    """One iteration: its run, its index, its end by ``time.monotonic``, and its scalars."""

    run: weakref.ref[Any]
    iter: int
    time: float
    outputs: dict[str, Any]


class Sum(NamedTuple):
    """The number of values, and their sum."""

    number: int = 0
    total: float = 0.0

    def plus(self, value: float) -> Sum:
        """Return the sum with one more value."""
        return Sum(self.number + 1, self.total + value)


def _sample(event: AfterTrainIter) -> Sample:
    """Sample the scalars of an iteration, on the training thread. Scalars on a device are copied on another thread."""
    return Sample(weakref.ref(event.run), event.progress.iter, time.monotonic(), _scalars(event.outputs))


class LatestHook(Hook):
    """Keep the latest scalars, checkpoint and state of the run on a bus.

    An iteration costs the training thread one look at the clock.
    """

    priority = Priority.LOWEST
    observes = True
    timing = True

    def __init__(self) -> None:
        self._lock = Lock()  # the checkpoints' events come from another thread
        self._run: weakref.ref[Any] | None = None
        self._progress = Progress()  # False after the end of the run
        self._rates: dict[tuple[str, str], float] = {}
        self._outputs: Mapping[str, Any] = {}
        self._samples: deque[Sample] = deque(maxlen=_WINDOW + 1)
        self.name_of_run = ""
        """The name of the run; empty before the first one begins."""
        self.state = RunState.RUNNING
        self.rank, self.world_size = 0, 1
        self.device = torch.device("cpu")
        self.metrics: dict[str, Any] = {}
        """The metrics of the last validation and the last test, such as ``"val/accuracy"``."""
        self.checkpoints: Counter[str] = Counter(committed=0, failed=0, skipped=0)
        self.stall, self.commit = Sum(), Sum()
        """Seconds that the training thread waited for copies of its state, and seconds of writing them."""
        self.committed_at: float | None = None
        """The time of the last commit, in seconds since 1970."""
        self.committed_bytes = 0

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def run(self) -> Any:
        """The run; None before it begins and after it was deleted."""
        return None if self._run is None else self._run()

    @property
    def lives(self) -> bool:
        """True while the run is open."""
        return self.state not in ENDED

    @property
    def progress(self) -> Progress:
        """The progress of the run; after its end, the last one."""
        run = self.run
        return run.progress if self.lives and run is not None else self._progress

    @property
    def rates(self) -> dict[tuple[str, str], float]:
        """The learning rates by the names of the optimizer and the parameter group."""
        run = self.run
        return _rates(run) if self.lives and run is not None else self._rates

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The scalars of a recent iteration, at most a second or one iteration old; after the end, of the last iteration."""
        if not self.lives:
            return self._outputs
        try:
            return self._samples[-1].outputs
        except IndexError:
            return {}

    def throughput(self) -> float:
        """Return the iterations per second of the last ten seconds (or iterations, if they are longer); 0 after the end."""
        samples = list(self._samples)
        if not self.lives or not samples:
            return 0.0
        return max(0, self.progress.iter - samples[0].iter) / max(time.monotonic() - samples[0].time, 1e-9)

    # ------------------------------------------------------------------------------------------------------- handlers

    @mount(BeforeRun)
    def begin(self, event: BeforeRun) -> None:
        """Start over with a new run."""
        self._meet(event.run)

    @mount(BeforeTrain, BeforeTrainEpoch, BeforeVal)
    def join(self, event: Any) -> None:
        """Follow a run that began before this hook was added."""
        if self.run is not event.run:
            self._meet(event.run)

    @mount(AfterTrainIter, every_seconds=1.0, capture=_sample, offload="thread", queue=2, full="drop_old", on_error="log")
    def take(self, sample: Sample) -> None:
        """Keep the sample of an iteration, on the thread of the lane."""
        if self._run is None:
            run = sample.run()
            if run is not None:
                self._meet(run)
        if self._run == sample.run:
            self._samples.append(sample)

    @mount(AfterValEpoch, AfterTestEpoch)
    def evaluated(self, event: AfterValEpoch | AfterTestEpoch) -> None:
        """Keep the metrics."""
        scalars = _scalars(event.metrics)
        self.metrics = self.metrics | {f"{event.progress.stage}/{name}": value for name, value in scalars.items()}

    @mount(CheckpointCommitted)
    def committed(self, event: CheckpointCommitted) -> None:
        """Count a committed checkpoint."""
        if not event.bytes:  # a further name of a file that is counted
            return
        with self._lock:
            self.checkpoints["committed"] += 1
            self.stall, self.commit = self.stall.plus(event.stall), self.commit.plus(event.seconds)
            self.committed_at, self.committed_bytes = time.time(), event.bytes

    @mount(CheckpointFailed, CheckpointSkipped)
    def not_committed(self, event: CheckpointFailed | CheckpointSkipped) -> None:
        """Count a failed or skipped checkpoint."""
        with self._lock:
            self.checkpoints["failed" if isinstance(event, CheckpointFailed) else "skipped"] += 1

    @mount(RunPaused, RunResumed)
    def pause(self, event: RunPaused | RunResumed) -> None:
        """Note that the run was paused or resumed."""
        self.state = RunState.PAUSED if isinstance(event, RunPaused) else RunState.RUNNING

    @mount(OnException)
    def fail(self, event: OnException) -> None:
        """Note that an exception ended the run."""
        interrupted = isinstance(event.exception, KeyboardInterrupt)
        self._end(event.run, event.progress, RunState.INTERRUPTED if interrupted else RunState.FAILED)

    @mount(AfterRun)
    def end(self, event: AfterRun) -> None:
        """Note the end of the run."""
        stopped = event.run.info.get("stop_reason")
        self._end(event.run, event.progress, RunState.STOPPED if stopped else RunState.FINISHED)

    def _meet(self, run: Any) -> None:
        self._samples.clear()
        self._run = weakref.ref(run)
        self.name_of_run, self.state = run.name, RunState.RUNNING
        self.rank, self.world_size, self.device = run.rank, run.world_size, run.device

    def _end(self, run: Any, progress: Progress, state: RunState) -> None:
        self._progress, self._rates, self._outputs = progress, _rates(run), _scalars(run.outputs) or self.outputs
        self.state = state


def _rates(run: Any) -> dict[tuple[str, str], float]:
    return {
        (name, str(group.get("name", index))): float(group["lr"])
        for name, optimizer in run.optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }


def _scalars(values: Mapping[str, Any] | msgspec.UnsetType) -> dict[str, Any]:
    """Return the numbers among ``values``, and the tensors and arrays of one element."""
    if isinstance(values, msgspec.UnsetType):  # an event built by hand, such as in a test
        return {}
    return {name: _detached(value) for name, value in values.items() if _is_scalar(value)}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float | np.generic) or (isinstance(value, np.ndarray) and value.size == 1)
