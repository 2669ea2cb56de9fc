"""``Tracer``: record a window of a run and write it as a trace, on a separate thread."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import numpy as np

from trainbus.eventloop.bus import Bus, Subscription
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.measure.spans import FIELDS, Spans
from trainbus.eventloop.offload import Deadline
from trainbus.eventloop.platform import memory_in_use
from trainbus.observe.trace.chrome import write_trace
from trainbus.observe.trace.tracks import Counter, Tracks, Window

_SAMPLE_EVERY: Final = 0.005  # seconds between two samples of the queues and the memory; a sample takes about 20 µs
_PATIENCE: Final = 30.0  # seconds to wait for offloaded handlers after the window
_REST: Final = 0.0005  # seconds that leave the GIL to the training, after about 0.5 ms of work on the trace

log = get_logger()


class Tracer:
    """Trace some iterations, from :meth:`begin` to :meth:`end`, both on the training thread.

    A separate thread samples queues and memory meanwhile. After the end it waits for the offloaded handlers of the window's
    events, commits of checkpoints included, and writes the file. An error there is logged, and training continues.

    Args:
        bus: a bus with ``bus.timing``.
        path: the file to write.
        process: the number of the process (its rank) and its title.
        iterations: number of iterations in the window; fewer if the run ends earlier.
    """

    def __init__(self, bus: Bus, path: Path, process: tuple[int, str], iterations: int) -> None:
        self._bus = bus
        self._recorder = bus.internal.recorder
        self._path = path
        self._process = process
        self._iterations = iterations
        self._batches: list[Spans] = []
        self._pauses: list[tuple[int, int, int, int]] = []
        self._paused = 0
        self._memory = Counter("memory of the process", "MB", [])
        self._queues: dict[Subscription, Counter] = {}
        self._threads: dict[int, str] = {}
        self._deadline = Deadline(None)
        self._began = 0
        self._bell: queue.SimpleQueue[None] = (
            queue.SimpleQueue()
        )  # gets an item at the begin and at the end; in C, so Ctrl-C cannot corrupt it
        self._recorder.add_reader(self._read)
        self._thread = threading.Thread(target=self._run, name="trainbus trace", daemon=True)
        self._thread.start()  # started here, because the begin of the window would have to wait for it

    def begin(self, first: int) -> None:
        """Begin the window, in the first handler of ``before_train_iter``; ``first`` is the number of this iteration."""
        self._first = first
        self._training = threading.get_ident()
        self._clock = _both_clocks()
        gc.callbacks.append(self._collected)
        self._began = perf_counter_ns()
        self._bell.put(None)

    @property
    def begun(self) -> bool:
        """True once the window has begun."""
        return bool(self._began)

    def end(self) -> None:
        """End the window after the last iteration whose ``after_train_iter`` was published. Does not wait. Idempotent."""
        self._bell.put(None)
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def close(self, patience: float) -> None:
        """End the window, and wait until the file is written, with at most ``patience`` for offloaded handlers. Idempotent."""
        self._deadline.shorten(patience)
        self.end()
        self._thread.join()

    def _read(self, spans: Spans) -> None:
        if self._began:
            self._batches.append(spans)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._paused = perf_counter_ns()
        elif self._paused:
            self._pauses.append((threading.get_ident(), self._paused, perf_counter_ns(), info["generation"]))
            self._paused = 0

    def _run(self) -> None:
        try:
            self._bell.get()
            if self._began:
                self._record()
        except Exception:
            log.exception("the trace could not be written; training continues", id="trace-not-written", path=str(self._path))
        finally:
            self._recorder.remove_reader(self._read)
            self._batches.clear()

    def _record(self) -> None:
        self._sample()
        while not self._rings_within(_SAMPLE_EVERY):
            self._sample()
        ended = _both_clocks()
        self._await_deliveries()
        self._recorder.drain()
        self._write(ended)

    def _rings_within(self, seconds: float) -> bool:
        try:
            self._bell.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def _sample(self) -> None:
        now = perf_counter_ns()
        _note(self._memory, now, memory_in_use() // 1_000_000)
        for one in self._bus.subscriptions:
            if one.lane is not None:
                if one not in self._queues:
                    alike = sum(other.label == one.label for other in self._queues)
                    name = f"pending: {one.label}" + f" ({alike + 1})" * bool(alike)
                    self._queues[one] = Counter(name, "events", [])
                _note(self._queues[one], now, one.lane.stats.pending)
        self._threads |= {one.ident: one.name for one in threading.enumerate() if one.ident is not None}

    def _await_deliveries(self) -> None:
        self._deadline.shorten(_PATIENCE)
        self._bus.internal.wait_for_saves(self._deadline)
        for one in self._bus.subscriptions:
            if one.lane is not None and one.mode != "stream":
                one.lane.join(self._deadline)

    def _write(self, ended: tuple[int, int]) -> None:
        spans = np.concatenate(self._batches) if self._batches else np.zeros((0, FIELDS), np.int64)
        self._batches.clear()
        names = self._recorder.names
        window = Window(spans, names, self._pauses, self._threads, self._training, self._first, self._began, self._iterations)
        made = Tracks(window, _rest)
        begin = min((track.slices[0].begin for track in made.tracks if track.slices), default=self._began)
        began, wall = self._clock
        counters = [self._memory, *self._queues.values()]
        clocks = [{"perf_counter_ns": one, "time_ns": other} for one, other in (self._clock, ended)]
        facts = {"rank": self._process[0], "pid": os.getpid(), "clock": clocks, "spans_lost": self._recorder.dropped}
        write_trace(self._path, self._process, made.tracks, made.arrows, counters, (begin, wall + begin - began), facts, _rest)
        log.info("trace written; open it in ui.perfetto.dev", path=str(self._path))


def _note(counter: Counter, now: int, value: int) -> None:
    if not counter.values or counter.values[-1][1] != value:
        counter.values.append((now, value))


def _both_clocks() -> tuple[int, int]:
    """Return the current time in ns of ``perf_counter_ns`` and in ns since 1970, equal to a fraction of a microsecond."""
    readings = []
    for _ in range(3):
        before, now, after = perf_counter_ns(), time.time_ns(), perf_counter_ns()
        readings.append((after - before, (before + after) // 2, now))
    return min(readings)[1:]


def _rest() -> None:
    time.sleep(_REST)
