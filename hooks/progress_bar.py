"""``ProgressBar``: where the run is, on the last line of the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from math import isfinite
from typing import Any, TextIO

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from eventloop import Hook, Priority, Scalars, check_options, get_logger, mount, register
from eventloop.events import AfterEpoch, AfterIter, BeforeEpoch, BeforeRun, RunEvent

log = get_logger()

# Pointrix' smoothing of the losses it shows: how much of a new value goes into the old one.
_NEW = 0.4


class BarMoved(RunEvent, kw_only=True):
    """The progress bar has something to show: ``done`` of ``total`` batches; ``total_iters`` of the whole training."""

    done: int = 0
    total: int | None = None
    total_iters: int | None = None
    outputs: Scalars


@register
class ProgressBar(Hook):
    """A bar for the epoch, validation or test under way, with its losses and when the training will be over.

    Ten times a second it hands a few numbers to a thread that draws; in all other iterations it looks at the clock. Where
    the output is no terminal it does nothing. ``ConsoleWriter`` prints above it if the two share a console, as they do by
    default. The bar goes however the run ends; the cursor is never hidden, so it survives a process that is killed.

    Args:
        console: where to draw; rich's shared one by default.

    Raises:
        ConfigurationError: ``console`` is no rich console.
    """

    priority = Priority.LOW
    observes = True
    ranks = "rank0"

    @check_options
    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._shown = False
        # Drawing starts on the lane's thread and is ended by the training thread.
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._title = ""
        self._losses: dict[str, float] = {}
        self._pace = _Pace()

    # --------------------------------------------------------------------------------- inline: on the training thread

    def before_run(self, event: BeforeRun) -> None:
        """Find out if there is a terminal."""
        console = self._console if self._console is not None else get_console()
        self._shown = console.is_terminal and not console.is_dumb_terminal
        self._pace = _Pace()
        if self._shown:
            event.run.defer(self._stop)

    def before_epoch(self, event: BeforeEpoch) -> None:
        """Begin a bar."""
        if self._shown:
            _publish(event, 0, {})

    @mount(every_seconds=0.1)
    def after_iter(self, event: AfterIter) -> None:
        """Move the bar."""
        if self._shown:
            _publish(event, event.batch_idx + 1, event.outputs)

    def after_epoch(self, event: AfterEpoch) -> None:
        """Fill the bar."""
        if self._shown and event.progress.stage == "train":
            _publish(event, event.progress.batch_idx + 1, {})

    def _stop(self) -> None:
        self._shown = False
        with self._lock:
            progress, self._progress = self._progress, None
            if progress is None:
                return
            try:
                progress.stop()
            except Exception:  # a terminal that is gone is no reason to fail a run that was fine
                log.exception("the progress bar could not be ended")

    # --------------------------------------------------------------------------------------- on the thread of the lane

    # A terminal that takes nothing (Ctrl-S, a slow connection) must not stop the training: old positions are dropped.
    @mount(BarMoved, offload="thread", batch=64, queue=64, full="drop_old", disable_after=3)
    def draw(self, events: list[BarMoved]) -> None:
        """Redraw the bar."""
        for event in events:
            if event.progress.stage == "train" and event.done:
                self._pace.moved(event)
            self._smooth(event)
        with self._lock:
            if self._shown:  # else the run is over, and nothing may start drawing again
                self._draw(events[-1])

    def _draw(self, event: BarMoved) -> None:
        details = [f"{name} {value:.4f}" for name, value in self._losses.items()]
        if event.progress.stage == "train" and self._pace.eta is not None:
            details.append(f"eta {timedelta(seconds=round(self._pace.eta))}")
        self._task_of(event, self._progress or self._begin(), "  ".join(details))

    def _begin(self) -> Progress:
        self._progress = _new_progress(self._console if self._console is not None else get_console())
        self._title = ""
        return self._progress

    def _task_of(self, event: BarMoved, progress: Progress, details: str) -> None:
        title = _title(event)
        if title == self._title:
            progress.update(self._task, completed=event.done, details=details)
        else:  # a new task, because rich takes total=None, the one of a loader without a length, for "as it was"
            for task in progress.task_ids:
                progress.remove_task(task)
            self._task = progress.add_task(title, total=event.total, completed=event.done, details=details)
            self._title = title
        if not progress.live.is_started:
            with progress.console as console:  # in one write: a process that is killed (SIGTERM) leaves no hidden cursor behind
                progress.start()
                console.show_cursor(True)
        progress.refresh()

    def _smooth(self, event: BarMoved) -> None:
        if event.done == 0:
            self._losses = {}
        for name, value in event.outputs.items():
            if "loss" in name and isinstance(value, int | float):
                old = self._losses.get(name, value)
                # One NaN would stay in the average for ever; shown once is enough.
                self._losses[name] = _NEW * value + (1 - _NEW) * old if isfinite(old) else value


class _Pace:
    """Iterations per second since the run began or was resumed, validations included."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None
        self.eta: float | None = None
        """Seconds that are left, where that can be told."""

    def moved(self, event: BarMoved) -> None:
        now, done = time.monotonic(), event.progress.iter + 1
        if self._start is None:
            self._start = now, done
        elapsed, made = now - self._start[0], done - self._start[1]
        if event.total_iters is not None and made > 0:
            self.eta = elapsed / made * (event.total_iters - done)


def _publish(event: BeforeEpoch | AfterIter | AfterEpoch, done: int, outputs: Mapping[str, Any]) -> None:
    run = event.run
    if event.progress.stage != "train":
        total = run.evaluation_length
    else:
        total = event.progress.max_iters if event.progress.max_iters is not None else run.epoch_length
    run.publish(BarMoved, done=done, total=total, total_iters=run.total_iters, outputs=outputs)


def _new_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[details]}"),
        console=console,
        auto_refresh=False,  # it would draw from a thread of its own, whose errors nobody could handle
        transient=True,
        # What is printed stands above the bar; but what goes to a file or a pipe stays there.
        redirect_stdout=_is_terminal(sys.stdout),
        redirect_stderr=_is_terminal(sys.stderr),
    )


def _is_terminal(file: TextIO | None) -> bool:
    return file is not None and file.isatty()


def _title(event: BarMoved) -> str:
    progress = event.progress
    if progress.stage != "train":
        return progress.stage
    if progress.max_iters is not None:
        return "train"
    total = "" if progress.max_epochs is None else f"/{progress.max_epochs}"
    return f"epoch {progress.epoch + 1}{total}"
