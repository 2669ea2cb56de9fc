"""``ProgressBar``: show the progress of a run on the last line of the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from math import isfinite
from types import MappingProxyType, NoneType
from typing import Any, ClassVar

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from trainbus.eventloop import Hook, Priority, Scalars, check_options, get_logger, mount
from trainbus.eventloop.events import AfterEpoch, AfterIter, AfterValEpoch, BeforeEpoch, BeforeRun, RunEvent
from trainbus.eventloop.notebook import in_notebook
from trainbus.eventloop.registry import register
from trainbus.eventloop.terminal import printable
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.progress_cell import ProgressCell

log = get_logger()

_NEW = 0.4  # weight of a new value in the smoothed losses


class BarMoved(RunEvent, kw_only=True):
    """A new position of the progress bar: ``done`` of ``total`` batches; ``total_iters`` counts the whole training."""

    done: int = 0
    total: int | None = None
    total_iters: int | None = None
    outputs: Scalars
    metrics: Scalars
    """Those of a validation that has ended."""


@register
class ProgressBar(CopiedAnew, Hook):
    """Show a bar for the present epoch, validation or test, with its losses and the time left of the training.

    Ten times a second the hook passes a few numbers to a thread that draws; other iterations only read the clock. If the
    output is not a terminal, the hook does nothing. ``ConsoleWriter`` prints above the bar if both use the same console, as by
    default. The bar disappears at the end of the run. The cursor stays visible, also if the process is killed.

    In a notebook it updates an output of the cell: the bar, a row for each validation, and the curve of the loss. The last two
    stay.

    Args:
        console: console to draw on; by default rich's shared one.
    """

    priority = Priority.LOW
    observes = True
    ranks = "rank0"
    of_run: ClassVar = {"_lock": threading.Lock, "_shown": bool, "_progress": None, "_cell": NoneType}

    @check_options
    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._shown = False
        # The lane's thread starts drawing, the training thread ends it.
        self._lock = threading.Lock()
        self._progress: Progress
        self._cell: ProgressCell | None = None
        self._task = TaskID(0)
        self._title = ""
        self._losses: dict[str, float] = {}
        self._start: tuple[float, int] | None = None  # a time in this run (seconds), and the iterations done by then
        self._eta: float | None = None  # seconds

    def before_run(self, event: BeforeRun) -> None:
        console = self._console or get_console()
        self._cell = ProgressCell() if self._console is None and in_notebook() else None
        self._shown = self._cell is not None or (console.is_terminal and not console.is_dumb_terminal)
        self._start = self._eta = None
        if self._cell is not None:
            self._cell.draw("", 0, None)  # first on this thread, which has the cell
        elif self._shown:
            self._progress, self._title = _new_progress(console), ""
        if self._shown:
            event.run.defer(self._stop)

    def before_epoch(self, event: BeforeEpoch) -> None:
        self._publish(event, 0, {})

    @mount(every_seconds=0.1)
    def after_iter(self, event: AfterIter) -> None:
        self._publish(event, event.batch_idx + 1, event.outputs)

    def after_epoch(self, event: AfterEpoch) -> None:
        if event.progress.stage == "train":
            self._publish(event, event.progress.batch_idx + 1, event.run.outputs)  # a curve has a point for each epoch
        elif isinstance(event, AfterValEpoch) and self._cell is not None:
            self._publish(event, event.progress.batch_idx + 1, {}, event.metrics)

    def _publish(
        self, event: RunEvent, done: int, outputs: Mapping[str, Any], metrics: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if self._shown:
            run, max_iters = event.run, event.progress.max_iters
            total = run.data.epoch_length if max_iters is None else max_iters
            total = total if event.progress.stage == "train" else run.data.evaluation_length
            run.publish(BarMoved, done=done, total=total, total_iters=run.data.total_iters, outputs=outputs, metrics=metrics)

    def _stop(self) -> None:
        self._shown = False
        with self._lock:
            try:
                if self._cell is not None:
                    self._cell.end()
                else:
                    self._progress.stop()
            except Exception:  # a lost terminal must not fail the run
                log.exception("cannot remove the progress bar", id="progress-bar-left")

    # A blocked terminal (Ctrl-S, a slow connection) must not stop training, so the queue drops old positions.
    @mount(BarMoved, offload="thread", batch=64, queue=64, full="drop_old", disable_after=3)
    def draw(self, events: list[BarMoved]) -> None:
        for event in events:
            self._take(event)
        with self._lock:
            if self._shown or self._cell is not None:
                self._draw(events[-1])
            if self._cell is not None and not self._shown:  # after the end of the run
                self._cell.end()

    def _take(self, event: BarMoved) -> None:
        """Smooth the losses, and estimate the time left from the pace of this run, validations included."""
        if event.done == 0:
            self._losses = {}
        for name, value in event.outputs.items():
            if "loss" in name and isinstance(value, int | float):
                old = self._losses.get(name, value)
                # A NaN would stay in the average for ever, so restart the average after it.
                self._losses[name] = _NEW * value + (1 - _NEW) * old if isfinite(old) else value
        if self._cell is not None:
            self._take_for_cell(self._cell, event)
        if event.progress.stage == "train" and event.done:
            now, done = time.monotonic(), event.progress.iter + 1
            began, first = self._start = self._start or (now, done)
            if event.total_iters is not None and done > first:
                self._eta = (now - began) / (done - first) * (event.total_iters - done)

    def _take_for_cell(self, shown: ProgressCell, event: BarMoved) -> None:
        if event.metrics:
            epoch = event.progress.epoch
            at = f"epoch {epoch}" if event.progress.max_iters is None else f"iteration {event.progress.iter}"
            shown.validated(at, {name: one for name, one in event.metrics.items() if isinstance(one, int | float)})
        if event.progress.stage == "train" and event.outputs and self._losses:
            shown.point(event.progress.iter + 1, next(iter(self._losses.values())))

    def _draw(self, event: BarMoved) -> None:
        title = _title(event)
        details = [f"{printable(name)} {value:.4f}" for name, value in self._losses.items()]
        if event.progress.stage == "train" and self._eta:
            details.append(f"eta {timedelta(seconds=round(self._eta))}")
        if self._cell is not None:
            of = "" if event.total is None else f"/{event.total}"
            self._cell.draw("  ".join([title, f"{event.done}{of}", *details]), event.done, event.total)
            return
        progress = self._progress
        if title != self._title:  # a new task, because rich ignores an update to total=None (a loader without a length)
            for task in progress.task_ids:
                progress.remove_task(task)
            self._task, self._title = progress.add_task(title, total=event.total, details=""), title
        progress.update(self._task, completed=event.done, details="  ".join(details))
        if not progress.live.is_started:
            with progress.console as console:  # one write, so that a killed process (SIGTERM) leaves the cursor visible
                progress.start()
                console.show_cursor(True)
        progress.refresh()


def _new_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[details]}", style="dim", markup=False),
        console=console,
        auto_refresh=False,  # rich would draw from its own thread, whose errors we could not handle
        transient=True,
        # Show printed lines above the bar, but do not redirect output to a file or a pipe.
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
    )


def _title(event: BarMoved) -> str:
    progress = event.progress
    if progress.stage != "train":
        return progress.stage
    if progress.max_iters is not None:
        return "train"
    return f"epoch {progress.epoch + 1}" + ("" if progress.max_epochs is None else f"/{progress.max_epochs}")
