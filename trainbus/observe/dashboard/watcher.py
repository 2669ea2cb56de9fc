"""``Watcher``: the hook that fills a dashboard's pages from the events of a bus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, cast

import msgspec

from trainbus.eventloop import events as ev
from trainbus.eventloop.bus.hook import Hook, mount
from trainbus.eventloop.bus.priority import Priority
from trainbus.observe.costs import Costs
from trainbus.observe.dashboard.page import Board, RunPage
from trainbus.observe.entries import CHECKPOINTS, entry_of

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
        self.pending_pages: deque[RunPage] = deque()
        self._newest: RunPage | None = None
        # Used by the thread of the lane only.
        self._open: list[RunPage] = []

    @mount(ev.BeforeRun, ev.BeforeTrain, ev.BeforeTrainEpoch, ev.BeforeVal, ev.BeforeTest, priority=Priority.LOW)
    def open_page(self, event: Any) -> None:
        """Create the page of a run that begins, or that began before this hook was added."""
        run = None if event.run is msgspec.UNSET else event.run
        begins, newest = isinstance(event, ev.BeforeRun), self._newest
        if begins or newest is None or newest.over or newest.story.run() is not run:
            self._newest = page = self.board.begin(run)
            self.pending_pages.append(page)
            if begins and run is not None:
                page.ends_later = True
                run.defer(partial(_leave, run, page))

    def note_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep the settings of the newest run, for the list of runs."""
        if self._newest is not None:
            self._newest.settings = settings

    @mount(ev.AfterRun, ev.OnException, priority=Priority.LOW)
    def note_end(self, event: ev.AfterRun | ev.OnException) -> None:
        """Keep how the run ends, from its live state."""
        if self._newest is not None:
            self._newest.end = entry_of(event)  # type: ignore[assignment]

    # A large batch: a wake-up of this thread costs the training more than a hand-off. Nothing here may end the training.
    @mount(
        ev.BeforeRun,
        ev.AfterLoadCheckpoint,
        ev.AfterTrainIter,
        ev.AfterTrainEpoch,
        ev.AfterValEpoch,
        ev.AfterTestEpoch,
        *CHECKPOINTS,
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
    def post(self, batch: list[ev.Event]) -> None:
        """Post a batch of events to the page of their run."""
        now = time.time()
        for kind, group in groupby(batch, type):
            if issubclass(kind, ev.AfterTrainIter):
                self._post_scalars(cast("Iterator[ev.AfterTrainIter]", group), now)
            else:
                for event in group:
                    self._post_event(event)

    def _page(self) -> RunPage | None:
        """Return the page of the newest run that has not ended."""
        while self._open and self._open[-1].over:
            self._open.pop()
        if not self._open and self.pending_pages:
            self._open.append(self.pending_pages.popleft())
        return self._open[-1] if self._open else None

    def _post_scalars(self, events: Iterator[ev.AfterTrainIter], now: float) -> None:
        if (page := self._page()) is None:
            return
        points = [(one.progress.iter + 1, one.progress.epoch + 1, now, one.outputs) for one in events]
        page.iter, page.epoch = points[-1][:2]
        page.messages.add(points)

    def _post_event(self, event: Any) -> None:
        if isinstance(event, ev.BeforeRun) and self.pending_pages:
            self._open.append(self.pending_pages.popleft())
        if (page := self._page()) is None:
            return
        progress = event.progress
        page.iter = max(page.iter, progress.iter)
        match event:
            case ev.BeforeRun() | ev.AfterTrainEpoch():
                limits = {"max_epochs": progress.max_epochs, "max_iters": progress.max_iters}
                page.messages.post("progress", limits, replace=True)
            case ev.CostsMeasured():
                page.costs(shortened(event.costs))
                if event.costs == page.last_costs:
                    page.close()
            case ev.LearningRateSet():
                page.note("lr", iter=progress.iter, lr=event.lr, optimizers=event.optimizers)
            case ev.OnException() | ev.AfterRun():
                if not page.ends_later:
                    page.close()
            case _:
                page.add(entry_of(event))


def _leave(run: Any, page: RunPage) -> None:
    """Close the page of a run that has ended and whose checkpoints are written."""
    page.last_costs = run.bus.costs() if run.bus.timing else None
    if page.last_costs is None:
        page.close()
    else:
        run.publish(ev.CostsMeasured, costs=page.last_costs)  # to the lane, behind all that was published before


def shortened(costs: Costs) -> dict[str, Any]:
    """Return the costs for a page: the largest parts and lanes, and quantiles of the step times."""
    payload: dict[str, Any] = msgspec.to_builtins(costs, str_keys=True)
    steps = costs.steps
    payload["steps"] = {"number": steps.total} | {f"p{share}": steps.quantile(share / 100) for share in (50, 90, 99)}
    payload["parts"] = payload["parts"][:_MOST_PARTS]
    payload["lanes"] = payload["lanes"][:_MOST_LANES]
    return payload
