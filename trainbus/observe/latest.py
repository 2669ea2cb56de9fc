"""``LatestHook``: keep the latest values of a run, for code that polls them, such as a scrape of ``/metrics``."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import torch

from trainbus.eventloop import events as ev
from trainbus.eventloop.bus import Hook, Priority, mount
from trainbus.observe.entries import CHECKPOINTS, begin_of, entry_of, scalars
from trainbus.observe.states import ENDED
from trainbus.observe.story import RunStory

_WINDOW: Final = 10  # samples that the throughput is measured over; one a second, or one an iteration if that takes longer


class Sample(NamedTuple):
    """One iteration: its run, its index, its end by ``time.monotonic``, and its scalars."""

    run: weakref.ref[Any]
    iter: int
    time: float
    outputs: dict[str, Any]


def _sample(event: ev.AfterTrainIter) -> Sample:
    """Sample the scalars of an iteration, on the training thread. Scalars on a device are copied on another thread."""
    return Sample(weakref.ref(event.run), event.progress.iter, time.monotonic(), _scalars(event.outputs))


class LatestHook(Hook):
    """Keep the story of the runs on a bus, and the latest scalars and learning rates.

    An iteration costs the training thread one look at the clock.
    """

    priority = Priority.LOWEST
    observes = True
    timing = True

    def __init__(self) -> None:
        self.story = RunStory()  # the story of all runs so far; without a name before the first one begins
        self._progress = ev.Progress()  # after the end of the run
        self._rates: dict[tuple[str, str], float] = {}
        self._outputs: Mapping[str, Any] = {}
        self._samples: deque[Sample] = deque(maxlen=_WINDOW + 1)
        self.rank, self.world_size = 0, 1
        self.device = torch.device("cpu")

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def _live_run(self) -> Any:
        """The run; None before it begins, after its end, and after it was deleted."""
        return None if self.story.state in ENDED else self.story.run()

    @property
    def progress(self) -> ev.Progress:
        """The progress of the run; after its end, the last one."""
        run = self._live_run
        return self._progress if run is None else run.progress

    @property
    def rates(self) -> dict[tuple[str, str], float]:
        """The learning rates by the names of the optimizer and the parameter group."""
        run = self._live_run
        return self._rates if run is None else _rates(run)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The scalars of a recent iteration, at most a second or one iteration old; after the end, of the last iteration."""
        if self.story.state in ENDED:
            return self._outputs
        try:
            return self._samples[-1].outputs
        except IndexError:
            return {}

    def throughput(self) -> float:
        """Return the iterations per second of the last ten seconds (or iterations, if they are longer); 0 after the end."""
        samples = list(self._samples)
        if self.story.state in ENDED or not samples:
            return 0.0
        return max(0, self.progress.iter - samples[0].iter) / max(time.monotonic() - samples[0].time, 1e-9)

    # ------------------------------------------------------------------------------------------------------- handlers

    @mount(ev.BeforeRun, ev.BeforeTrain, ev.BeforeTrainEpoch, ev.BeforeVal)
    def join(self, event: Any) -> None:
        """Start over with a run that begins, or that began before this hook was added."""
        if isinstance(event, ev.BeforeRun) or self.story.run() is not event.run:
            self._follow(event.run)

    @mount(ev.AfterTrainIter, every_seconds=1.0, capture=_sample, offload="thread", queue=2, full="drop_old", on_error="log")
    def keep_sample(self, sample: Sample) -> None:
        """Keep the sample of an iteration, on the thread of the lane."""
        run = sample.run()
        if run is None:
            return
        if self.story.run() is None:  # this hook was added in an epoch
            self._follow(run)
        if self.story.run() is run:
            self._samples.append(sample)

    @mount(ev.AfterValEpoch, ev.AfterTestEpoch, *CHECKPOINTS, ev.RunPaused, ev.RunResumed)
    def note(self, event: Any) -> None:
        """Add an event to the story."""
        self.story.add(entry_of(event))

    @mount(ev.OnException, ev.AfterRun)
    def end(self, event: ev.OnException | ev.AfterRun) -> None:
        """Keep the last values of a run that ends."""
        run = event.run
        self._progress, self._rates, self._outputs = event.progress, _rates(run), _scalars(run.outputs) or self.outputs
        self.story.add(entry_of(event))

    def _follow(self, run: Any) -> None:
        self._samples.clear()
        self.story.add(begin_of(run))
        self.rank, self.world_size, self.device = run.rank, run.world_size, run.device


def _rates(run: Any) -> dict[tuple[str, str], float]:
    return {
        (name, str(group.get("name", index))): float(group["lr"])
        for name, optimizer in run.optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }


def _scalars(values: Mapping[str, Any] | msgspec.UnsetType) -> dict[str, Any]:
    return {} if isinstance(values, msgspec.UnsetType) else scalars(values)  # unset in an event built by hand
