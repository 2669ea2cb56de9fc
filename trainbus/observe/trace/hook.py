"""``TraceHook``: write a trace of some iterations, thread by thread."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, get_logger
from trainbus.eventloop.events import BeforeTrain, BeforeTrainIter, OnException
from trainbus.eventloop.registry import register
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import NonNegativeInt, PositiveInt
from trainbus.observe.trace.record import Tracer

_PATIENCE = 10.0  # seconds that the end of training waits for the handlers of the window's events

log = get_logger()


@register
class TraceHook(CopiedAnew, Hook):
    """Write ``trace.json`` in the work dir, which https://ui.perfetto.dev opens: what each thread did in some iterations.

    - The training thread, each lane (checkpoints have one), and each worker process are a track. Slices are iterations, data
      waiting, forward, backward, mount points, and handlers by name; garbage collections, too.
    - Arrows go from a hand-off to the call of the offloaded handler, and from the request of a checkpoint to its commit.
    - Curves are the events that are pending in each lane, and the memory of the process.

    With several processes each writes its own, ``trace.rank1.json`` for rank 1. ``trainbus trace merge`` makes one picture of
    them, also with the file of a ``ProfilerHook(json_trace_path=...)``, whose kernels then have the same time axis.

    A thread of its own makes the file after the window, with about 3 kB an iteration. For 50 iterations that takes about 40 ms
    of the interpreter's time, in small pieces. The run measures all the time (``bus.timing``); the window adds next to nothing.

    Args:
        first: iterations before the window, counted since training began or was resumed.
        iterations: length of the window in iterations. It ends earlier with the training.

    Raises:
        ConfigurationError: later: the run has no work dir.
    """

    priority = Priority.HIGHEST
    observes = True
    timing = True
    of_run: ClassVar = {"_tracer": NoneType}

    @check_options
    def __init__(self, first: NonNegativeInt = 100, iterations: PositiveInt = 50) -> None:
        self.first = first
        self.iterations = iterations
        self._tracer: Tracer | None = None
        self._count = 0
        self._patience = _PATIENCE

    def files_of_run(self, work_dir: Path) -> Collection[Any]:
        return [work_dir / name for name in ("trace.json", "trace.rank0.json")]

    def before_train(self, event: BeforeTrain) -> None:
        run = event.run
        if run.work_dir is None:
            raise ConfigurationError(f"{self.label} writes to the work dir, but the run has none; {run.work_dir_advice}")
        if run.bus.internal.recorder is None:
            raise ConfigurationError(f"{self.label} needs bus.timing, but it was set to False; leave it on")
        self._count, self._patience = 0, _PATIENCE
        name = f"trace.rank{run.rank}.json" if run.world_size > 1 else "trace.json"
        title = f"rank {run.rank} of {run.name}" if run.world_size > 1 else run.name
        self._tracer = Tracer(run.bus, run.work_dir / name, (run.rank, title), self.iterations)
        run.defer(self._close)

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        count = self._count
        self._count = count + 1
        if count == self.first and self._tracer is not None:
            self._tracer.begin(event.progress.iter)
        elif count == self.first + self.iterations and self._tracer is not None:
            self._tracer.end()

    def on_exception(self, event: OnException) -> None:
        self._patience = 1.0

    def _close(self) -> None:
        if self._tracer is None:
            return
        self._tracer.close(self._patience)
        if not self._tracer.begun:
            log.warning(
                "no trace was made: training ended before its first iteration; give a smaller first=",
                id="no-trace",
                hook=self.label,
                first=self.first,
                iterations=self._count,
            )
        self._tracer = None
