"""Measure how much longer a step of plain Python takes while a save is being written.

The step needs the GIL for all of its 2 ms, as a loop of many small operations does. It is timed from the return of ``save``
until the file is on disk; then the next save begins. Libraries that save on the calling thread only (torch.save, safetensors)
get a thread by hand, without the copy that this would need. The blocking ways of DCP and MMEngine take no part. A thread that
only writes as many bytes shows the cost of any work beside the step on this machine.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from timeit import Timer

from benchmarks.handoff import percentile
from benchmarks.harness import Budget, Comparison, Settings, Tick, measure
from benchmarks.peers import Saver
from benchmarks.saving import RAW, Size, prepared, raw_write, remove, sync

NO_SAVE = "no save"
STEP = 0.002  # seconds
TRIAL = 50_000  # iterations of its loop, to calibrate their duration
LIMIT = 1.1  # of the p99
ON_A_THREAD = ("torch.save + fsync", "safetensors")
LONGEST = 4.0
"""Seconds of a sample. A contender that slows the steps down too much gets fewer of them, and only one sample."""

_numbers = count(1)

Step = Callable[[], object]
StartSave = Callable[[], Future[object]]


def steps(settings: Settings, size: Size, directory: Path, tick: Tick) -> list[Comparison]:
    """Compare the median step and the 99th percentile with those of steps without a save."""
    rounds, number = settings.rounds(quick=1, full=11), settings.rounds(quick=100, full=500)
    step = python_step()
    with ExitStack() as scopes:
        savers, left_out = prepared(scopes, size.model(), directory)
        pool = scopes.enter_context(ThreadPoolExecutor(1))
        contenders = {NO_SAVE: Steps(step, number), RAW: Steps(step, number, partial(pool.submit, raw_write(size, directory)))}
        for name, saver in savers.items():
            if saver.background or name in ON_A_THREAD:
                contenders[name] = Steps(step, number, partial(start_save, saver, directory, pool))
        middle = measure(contenders, rounds, tick)
    last = {name: each.p99[-rounds:] for name, each in contenders.items()}
    title = f"A Python step beside saves of {size}"
    return [
        Comparison(f"{title}: p50", "ms", NO_SAVE, middle, left_out=left_out),
        Comparison(f"{title}: p99", "ms", NO_SAVE, last, budget=Budget(None, LIMIT), left_out=left_out),
    ]


class Steps:
    """A sample is the median of many steps, all beside one save or another; their p99 is noted, too."""

    def __init__(self, step: Step, number: int, start: StartSave | None = None) -> None:
        self.step = step
        self.number = number
        self.start = start
        self.p99: list[float] = []
        self.once: tuple[float, float] | None = None

    def __call__(self) -> float:
        p50, p99 = self.once or self.sample()
        self.p99.append(p99)
        return p50

    def sample(self) -> tuple[float, float]:
        start = time.monotonic()
        times = [seconds for _, seconds in zip(range(self.number), self.durations(), strict=False)]
        p50, p99 = percentile(times, 50), percentile(times, 99)
        if time.monotonic() - start > LONGEST:
            self.once = p50, p99
        return p50, p99

    def durations(self) -> Iterator[float]:
        """Yield the seconds of consecutive steps; finish a running save at the end."""
        deadline = time.monotonic() + LONGEST
        saving = None
        try:
            while time.monotonic() < deadline:
                if self.start is not None and (saving is None or saving.done()):
                    finish(saving)
                    saving = self.start()
                start = time.perf_counter()
                self.step()
                yield time.perf_counter() - start
        finally:
            finish(saving)


def start_save(saver: Saver, directory: Path, pool: ThreadPoolExecutor) -> Future[object]:
    """Save, and sync and remove the file on a thread."""
    path = directory / f"beside_{next(_numbers)}"
    if saver.background:
        saver.save(path)

    def rest() -> None:
        if not saver.background:
            saver.save(path)
        saver.settle()
        sync(path)

    future = pool.submit(rest)
    future.add_done_callback(lambda done: None if done.exception() else remove(path))
    return future


def finish(saving: Future[object] | None) -> None:
    if saving is not None:
        saving.result()


def python_step() -> Step:
    """Run Python for about 2 ms without releasing the GIL."""

    def work(number: int) -> int:
        total = 0
        for i in range(number):
            total += i & 7
        return total

    timer = Timer(partial(work, TRIAL))
    return partial(work, round(TRIAL * STEP / statistics.median(timer.repeat(15, 1))))
