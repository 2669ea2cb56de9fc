"""``RunPage``: the messages of one run and the commands to it; ``Board``: the pages of one process."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch

from trainbus.eventloop.errors import TrainbusError
from trainbus.observe.curves import Curve, stage_and_name
from trainbus.observe.dashboard.checkpoint_files import CheckpointFiles, last_part
from trainbus.observe.dashboard.message_log import MessageLog
from trainbus.observe.entries import begin_of
from trainbus.observe.record import Begin, Checkpoint, End, Entry, Evaluation, Pause, Resume, fields_of
from trainbus.observe.states import ENDED, RunStatus
from trainbus.observe.story import RunStory

Command = Literal["pause", "resume", "stop", "checkpoint", "lr"]

_MOST_ENDED: Final = 20  # most pages of ended runs; the oldest are dropped
_MOST_EVALUATIONS: Final = 2000
_MOST_POINTS: Final = 300  # of a curve in a chart of several runs


class CommandRefusedError(TrainbusError):
    """A run cannot execute a visitor's command."""


class RunPage:
    """The story, the messages and the commands of one run. Holds the run weakly.

    Commands are safe from any thread and take effect at the next safe mount point of the run, as in code.
    """

    def __init__(self, number: int, run: Any, begin: Begin | None = None) -> None:
        self.number = number
        reads_files = begin is not None
        begin = begin or begin_of(run)
        self.story = RunStory()
        self.story.add(begin)
        self.name, self.began = begin.name or "run", begin.time
        self.end = End(time=0.0, state=RunStatus.FINISHED)  # how the run ends; posted when its last checkpoint is written
        self.ends_later = False  # True if the page ends after the last checkpoint is written instead of with `after_run`
        self.last_costs: Any = None
        self.iter = self.epoch = 0
        self.messages = MessageLog()
        self.files = CheckpointFiles(self.messages)
        self.settings: Mapping[str, Any] = {}
        self._evaluated: deque[tuple[str, int, Mapping[str, float]]] = deque(maxlen=_MOST_EVALUATIONS)
        self.refusals = _refusals(
            run, reads_files=reads_files
        )  # reasons why commands are not possible, by command; empty if all are possible
        facts = {"name": self.name, "work_dir": begin.work_dir or "", "began": self.began, "state": self.story.state}
        self.messages.post("hello", facts | {"refusals": self.refusals, "lr": learning_rate(run)})

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return self.messages.over

    def add(self, entry: Entry) -> None:
        """Add an entry to the story, and post it."""
        if self.over:
            return
        self.iter = max(self.iter, entry.iter)
        self.story.add(entry)
        match entry:
            case Pause():
                self._post_state()
            case End():
                self._post_state(entry.reason, entry.time)
            case _:
                self.epoch = entry.epoch if isinstance(entry, Resume) else self.epoch
                fields = fields_of(entry)
                if isinstance(entry, Evaluation):
                    self._evaluated.append((entry.stage, entry.iter, fields["metrics"]))
                if "names" in fields:
                    fields["names"] = [last_part(name) for name in fields["names"]]
                self.messages.post(fields.pop("kind"), fields)
                if isinstance(entry, Checkpoint):
                    self.files.add(entry)

    def close(self) -> None:
        """Post the end of the run as the last message."""
        self.last_costs = None
        self.files.refresh()
        self.add(self.end)

    def note(self, kind: str, **facts: Any) -> None:
        """Post a note about an event of the run."""
        self.messages.post(kind, self._where() | facts)

    def costs(self, costs: Mapping[str, Any]) -> None:
        """Post the run's costs so far, in place of the previous ones."""
        self.messages.post("costs", {**costs, "lr": learning_rate(self.story.run())}, replace=True)
        self.files.refresh()  # a hook may have removed some since the last save

    def command(self, name: Command, lr: float = 0.0) -> None:
        """Send a command to the run.

        Raises:
            CommandRefusedError: the run has ended or cannot do this.
            ConfigurationError: the learning rate is missing or invalid.
        """
        run = self.story.run()
        if self.over or run is None:
            raise CommandRefusedError(self.refusals.get(name, "the run has ended"))
        if name in self.refusals:
            raise CommandRefusedError(self.refusals[name])
        match name:
            case "pause":
                self._ask(RunStatus.PAUSING)  # first, because the run may be paused at once
                run.pause()
            case "resume":
                run.unpause()
                if self.story.state is RunStatus.PAUSING:  # it was not paused yet, so no run_resumed will come
                    self._ask(RunStatus.RUNNING)
            case "stop":
                self._ask(RunStatus.STOPPING)
                run.stop("stopped from the dashboard")
            case "checkpoint":
                run.checkpoints.save()
                self.note("asked", what="a checkpoint")
            case "lr":
                run.set_lr(lr)
                self.note("asked", what=f"the learning rate {lr:g}")

    def summary(self) -> dict[str, Any]:
        """Return the run's row in the list of runs."""
        where = {"iter": self.iter, "epoch": self.epoch}
        return {"number": self.number, "name": self.name, "state": self.story.state, "began": self.began} | where

    def curves(self) -> list[dict[str, Any]]:
        """Return the curves of the run for a chart of several runs: name, stage, iterations and values of each, thinned."""
        found: dict[tuple[str, str], tuple[list[float], list[float]]] = {}

        def add(name: str, stage: str, iteration: int, value: float) -> None:
            stage, name = stage_and_name(name, stage)
            iterations, values = found.setdefault((name, stage), ([], []))
            if not iterations or iteration > iterations[-1]:
                iterations.append(iteration)
                values.append(value)

        for point in self.messages.points():
            for name, value in point.values.items():
                add(name, "train", point.iter, value)
        for stage, iteration, metrics in list(self._evaluated):
            for name, value in metrics.items():
                add(name, stage, iteration, value)
        return [{"name": name, "stage": stage, **_thinned(*columns)} for (name, stage), columns in found.items()]

    def _ask(self, state: RunStatus) -> None:
        """Post the state between a command and its effect."""
        if not self.over:
            self.story.state = state
            self._post_state()

    def _post_state(self, reason: str = "", at: float = 0.0) -> None:
        state = self.story.state
        over = state in (*ENDED, RunStatus.KILLED)
        where = self._where() | ({"time": at} if at else {})
        self.messages.post("state", where | {"state": state, "over": over, "reason": reason}, last=over)

    def _where(self) -> dict[str, Any]:
        return {"time": time.time(), "iter": self.iter, "epoch": self.epoch}


def _thinned(iterations: list[float], values: list[float]) -> dict[str, list[float]]:
    blank = np.full(len(values), np.nan)
    curve = Curve(np.array(iterations, np.float64), blank, blank, np.array(values, np.float64)).thinned(_MOST_POINTS)
    return {"iter": curve.iterations.tolist(), "values": curve.values.tolist()}


class Board:
    """The pages of the runs that one server shows, by number. Every method may be called from any thread."""

    def __init__(self, most_ended: int | None = _MOST_ENDED) -> None:
        self._lock = threading.Lock()
        self._pages: dict[int, RunPage] = {}
        self._number = 0
        self._most_ended = most_ended  # None: the pages of all ended runs stay
        self.closed = False  # True when the server ends; readers then disconnect
        self.collect: Callable[[Any], object] | None = None  # called with the bus of each run that begins, for `/metrics`

    def __iter__(self) -> Iterator[RunPage]:
        with self._lock:
            return iter(list(self._pages.values()))

    def get(self, number: int) -> RunPage | None:
        """Return the page with a number; None if there is none."""
        with self._lock:
            return self._pages.get(number)

    def remove(self, page: RunPage) -> None:
        """Remove the page of a run."""
        with self._lock:
            self._pages.pop(page.number, None)

    def begin(self, run: Any, begin: Begin | None = None) -> RunPage:
        """Create the page of a run, or of one in files with this beginning."""
        if self.collect is not None and run is not None:
            self.collect(run.bus)
        with self._lock:
            self._number += 1
            page = self._pages[self._number] = RunPage(self._number, run, begin)
            ended = [number for number, one in self._pages.items() if one.over]
            for number in ended[: -self._most_ended] if self._most_ended else ():
                del self._pages[number]
            return page


def learning_rate(run: Any) -> float | None:
    """Return the learning rate of the first optimizer; None if unknown or on a GPU, where reading it would wait."""
    for optimizer in getattr(run, "optimizers", {}).values():
        rate = optimizer.param_groups[0]["lr"]
        if isinstance(rate, torch.Tensor) and not rate.is_cpu:
            return None
        return float(rate) if math.isfinite(rate) else None
    return None


def _refusals(run: Any, *, reads_files: bool) -> dict[str, str]:
    """Return the reasons why commands are not possible, by command."""
    if run is None:
        why = (
            "this page shows the files of a run"
            if reads_files
            else "these events do not belong to a Run that could be controlled"
        )
        every: tuple[Command, ...] = ("pause", "resume", "stop", "checkpoint", "lr")
        return dict.fromkeys(every, why)
    refusals = {}
    if not run.optimizers:
        refusals["lr"] = "this run has no optimizer"
        refusals["checkpoint"] = "this run does not train"
    elif run.work_dir is None:
        refusals["checkpoint"] = f"this run has no work dir: {run.work_dir_advice}"
    return refusals
