"""Measure the time that a profiler adds to a training, in each system's own loop, and check its report.

The job is the one of ``training`` with every feature on: scalars at every iteration, an average, a schedule, and a checkpoint
after each third of a run. Its model is as wide as the bare loop needs to take 1 or 5 ms on this machine. The figure is the
median iteration of the second half. It includes the profiler's work at each iteration, but neither its work once per run, such
as the report, nor its occasional work beside the training. (The mean includes all of it, and varies by 5 % from run to run on
a shared machine.) The ways of a system alternate in one process. TraceML has separate processes, see ``peers.traceml``.
"""

import importlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from benchmarks.cost_figures import ALONE, CostFigures
from benchmarks.digits import Clocked, Job
from benchmarks.harness import Sample, Samples, Settings, measure, one_thread
from benchmarks.peers import TITLES, Told, handwritten, load, trainbus

PEERS = ("lightning", "ignite")
STEPS = {"1 ms": (0.001, 400), "5 ms": (0.005, 100)}
"""Title of a step, its seconds, and iterations of a run."""
NARROWEST, WIDER = 128, 16
"""The first width to try, and by how much the next one is wider."""
TRACEML = "hand-written loop"


def run(settings: Settings) -> list[CostFigures]:
    peers, left_out = load(PEERS)
    modules = {"trainbus": trainbus, **peers}
    sizes = {title: (width_of(seconds), iterations) for title, (seconds, iterations) in STEPS.items()}
    rounds, parts = settings.rounds(quick=1, full=15), len(modules) * len(sizes) + 1
    told = {name: each.told for module in modules.values() for name, each in module.PROFILERS.items()}
    samples: dict[str, dict[str, Samples]] = {title: {} for title in sizes}
    for number, (size, title, module) in enumerate((size, *each) for size in sizes for each in modules.items()):

        def tick(done: int, of: int, number: int = number) -> None:
            settings.tick_part(number, parts, done, of)

        with one_thread():
            samples[size][title] = measure(dict(contenders(module, *sizes[size])), rounds, tick)
    try:
        of_traceml, told["TraceML"] = traceml(sizes, settings.rounds(quick=1, full=3), settings.rounds(quick=1, full=9))
    except ImportError as error:
        left_out[TITLES["traceml"]] = str(error)
    else:
        for size in sizes:
            samples[size][TRACEML] = of_traceml[size]
    return [CostFigures(f"A step of {size}: what measuring adds", samples[size], told, left_out) for size in sizes]


def width_of(seconds: float) -> int:
    """Return the width of the model with which an iteration of the bare loop takes at least ``seconds``."""
    width = NARROWEST
    with one_thread():
        while bare(width) < seconds:
            width += WIDER
    return width


def bare(width: int) -> float:
    """Seconds of an iteration, the least of three runs."""
    jobs = [Clocked(60, hidden=width) for _ in range(3)]
    for job in jobs:
        handwritten.train_bare(job, Path())
    return min(job.seconds() for job in jobs)


def contenders(module: ModuleType, width: int, iterations: int) -> Iterator[tuple[str, Sample]]:
    yield ALONE, sample(module.train, width, iterations)
    for name, each in module.PROFILERS.items():
        yield name, sample(each.train, width, iterations, lambda report, name=name, told=each.told: told.check(name, report()))


def sample(
    train: Callable[[Job, Path], object], width: int, iterations: int, look: Callable[[Callable[[], str]], None] | None = None
) -> Sample:
    """Return a function that trains a new model and returns the seconds per iteration."""

    def seconds() -> float:
        job = Clocked(iterations, hidden=width)
        with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
            report = train(job, Path(directory))
            if look is not None:
                look(report)
        return job.seconds()

    return seconds


def traceml(sizes: Mapping[str, tuple[int, int]], rounds: int, repeats: int) -> tuple[Mapping[str, Samples], Told]:
    """Train with TraceML and without it, in turn: samples by the size of the step. ``sizes`` are widths and iterations.

    Raises:
        ImportError: TraceML is not installed.
    """
    peer = importlib.import_module("benchmarks.peers.traceml")
    samples: dict[str, Samples] = {size: {ALONE: [], "TraceML": []} for size in sizes}
    for _ in range(rounds):
        for name in (ALONE, "TraceML"):
            found, printed = peer.seconds([*sizes.values()], repeats, with_traceml=name != ALONE)
            if name != ALONE:
                peer.TOLD.check(name, printed)
            for size, times in zip(sizes, found, strict=True):
                samples[size][name].append(statistics.median(times))
    return samples, peer.TOLD
