"""``Watcher``: the hook that fills a dashboard's pages from the events of a bus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, cast

import msgspec

from eventloop import events as ev
from eventloop.bus.hook import Hook, mount
from eventloop.bus.priority import Priority
from eventloop.observe.costs import Costs
from eventloop.observe.dashboard.page import Board, RunPage
from eventloop.observe.story import RunState

_MOST_PARTS = 40
_MOST_LANES = 40


class Watcher(Hook):
    """Fill the pages of a :class:`Board` from the events of the bus.

    The training thread creates one page per run and hands events to one lane. A full lane drops its oldest events, so
    training never waits. A separate thread does the rest.
    """

    observes = True
    ranks = "rank0"
    timing = True

    def __init__(self, board: Board | None = None) -> None:
        self.board = Board() if board is None else board
        self._met: deque[RunPage] = deque()
        self._newest: RunPage | None = None
        # Used by the thread of the lane only.
        self._open: list[RunPage] = []

    @mount(ev.BeforeRun, ev.BeforeTrain, ev.BeforeTrainEpoch, ev.BeforeVal, ev.BeforeTest, priority=Priority.LOW)
    def meet(self, event: Any) -> None:
        """Create the page of a run that begins, or that began before this hook was added."""
        run = None if event.run is msgspec.UNSET else event.run
        begins, newest = isinstance(event, ev.BeforeRun), self._newest
        if begins or newest is None or newest.over or not newest.is_of(run):
            self._newest = page = self.board.begin(run)
            self._met.append(page)
            if begins and run is not None:
                page.ends_later = True
                run.defer(partial(_leave, run, page))

    @mount(ev.AfterRun, priority=Priority.LOW)
    def note_reason(self, event: Any) -> None:
        """Keep the reason of a stop, which only the run object has."""
        if self._newest is not None and event.run is not msgspec.UNSET:
            self._newest.stop_reason = str(event.run.info.get("stop_reason", ""))

    # A large batch: a wake-up of this thread costs the training more than a hand-off. Nothing here may end the training.
    @mount(
        ev.BeforeRun,
        ev.AfterLoadCheckpoint,
        ev.AfterTrainIter,
        ev.AfterTrainEpoch,
        ev.AfterValEpoch,
        ev.AfterTestEpoch,
        ev.CheckpointCommitted,
        ev.CheckpointFailed,
        ev.CheckpointSkipped,
        ev.CostsMeasured,
        ev.RunPaused,
        ev.RunResumed,
        ev.LearningRateSet,
        ev.OnException,
        ev.AfterRun,
        priority=Priority.LOWEST,
        offload="thread",
        batch=1024,
        queue=4096,
        linger=0.2,
        full="drop_old",
        on_error="log",
    )
    def tell(self, batch: list[ev.Event]) -> None:
        """Post a batch of events to the page of their run."""
        now = time.time()
        for kind, group in groupby(batch, type):
            if issubclass(kind, ev.AfterTrainIter):
                self._scalars(cast("Iterator[ev.AfterTrainIter]", group), now)
                continue
            for event in group:
                self._tell(event)

    def _page(self) -> RunPage | None:
        """Return the page of the newest run that has not ended."""
        while self._open and self._open[-1].over:
            self._open.pop()
        if not self._open and self._met:
            self._open.append(self._met.popleft())
        return self._open[-1] if self._open else None

    def _scalars(self, events: Iterator[ev.AfterTrainIter], now: float) -> None:
        if (page := self._page()) is None:
            return
        points = [(one.progress.iter + 1, one.progress.epoch + 1, now, one.outputs) for one in events]
        page.iter, page.epoch = points[-1][:2]
        page.feed.add(points)

    def _tell(self, event: Any) -> None:
        if isinstance(event, ev.BeforeRun) and self._met:
            self._open.append(self._met.popleft())
        if (page := self._page()) is None:
            return
        progress: Any = getattr(event, "progress", None)
        if progress is not None:
            page.iter = max(page.iter, progress.iter)
        match event:
            case ev.BeforeRun() | ev.AfterTrainEpoch():
                limits = {"max_epochs": progress.max_epochs, "max_iters": progress.max_iters}
                page.feed.post("progress", limits, replace=True)
            case ev.AfterLoadCheckpoint():
                page.epoch = progress.epoch
                page.note("resume", iter=progress.iter, path=event.path)
            case ev.AfterValEpoch() | ev.AfterTestEpoch():
                page.note("metrics", iter=progress.iter, stage=progress.stage, values=_numbers(event.metrics))
            case ev.CheckpointCommitted():
                page.note(
                    "checkpoint",
                    iter=progress.iter,
                    names=_files(event),
                    bytes=event.bytes,
                    stall=event.stall,
                    seconds=event.seconds,
                )
            case ev.CheckpointFailed():
                page.note("checkpoint_failed", iter=progress.iter, names=_files(event), reason=event.error)
            case ev.CheckpointSkipped():
                page.note("checkpoint_skipped", iter=progress.iter, names=_files(event), reason=event.reason)
            case ev.CostsMeasured():
                page.costs(shortened(event.costs))
                if event.costs == page.last_costs:
                    page.end()
            case ev.RunPaused():
                page.to_state(RunState.PAUSED)
            case ev.RunResumed():
                page.to_state(RunState.STOPPING if page.state is RunState.STOPPING else RunState.RUNNING)
            case ev.LearningRateSet():
                page.note("lr", iter=progress.iter, lr=event.lr, optimizers=event.optimizers)
            case ev.OnException():
                interrupted = event.error.startswith("KeyboardInterrupt")
                page.result = RunState.INTERRUPTED if interrupted else RunState.FAILED, event.error
            case ev.AfterRun():
                page.result = RunState.STOPPED if page.stop_reason else RunState.FINISHED, page.stop_reason
                if not page.ends_later:
                    page.end()


def _leave(run: Any, page: RunPage) -> None:
    """Close the page of a run that has ended and whose checkpoints are written."""
    page.last_costs = run.costs()
    if page.last_costs is None:
        page.end()
    else:
        run.publish(ev.CostsMeasured, costs=page.last_costs)  # to the lane, behind all that was published before


def shortened(costs: Costs) -> dict[str, Any]:
    """Return the costs for a page: the largest parts and lanes, and quantiles of the step times."""
    told: dict[str, Any] = msgspec.to_builtins(costs, str_keys=True)
    steps = costs.steps
    told["steps"] = {"number": steps.total} | {f"p{share}": steps.quantile(share / 100) for share in (50, 90, 99)}
    told["parts"] = told["parts"][:_MOST_PARTS]
    told["lanes"] = told["lanes"][:_MOST_LANES]
    return told


def _files(event: ev.CheckpointCommitted | ev.CheckpointFailed | ev.CheckpointSkipped) -> list[str]:
    """Return the file names of a checkpoint, without folders."""
    return [name.rstrip("/").rpartition("/")[2] for name in event.names or [event.path]]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        if isinstance(value, str):
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue  # a tensor of several elements, or another object
    return found
