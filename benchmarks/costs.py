"""Measure the time that a profiler adds to a training, in each system's own loop, and check its report.

The job is the one of ``training`` with every feature on: scalars at every iteration, an average, a schedule, and a checkpoint
after each third of a run. The figure is the median iteration of the second half. It includes the profiler's work at each
iteration, but neither its work once per run, such as the report, nor its occasional work beside the training. (The mean
includes all of it, and varies by 5 % from run to run on a shared machine.) The ways of a system alternate in one process.
TraceML has separate processes, see ``peers.traceml``.
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
from benchmarks.peers import TITLES, Told, load, trainbus

PEERS = ("lightning", "ignite")
SIZES = {"1 ms": (192, 400), "5 ms": (640, 100)}
"""Title of a step, width of the model that gives it, and iterations of a run."""
TRACEML = "hand-written loop"


def run(settings: Settings) -> list[CostFigures]:
    peers, left_out = load(PEERS)
    modules = {"trainbus": trainbus, **peers}
    rounds, parts = settings.rounds(quick=1, full=9), len(modules) * len(SIZES) + 1
    told = {name: each.told for module in modules.values() for name, each in module.PROFILERS.items()}
    samples: dict[str, dict[str, Samples]] = {title: {} for title in SIZES}
    for number, (size, title, module) in enumerate((size, *each) for size in SIZES for each in modules.items()):

        def tick(done: int, of: int, number: int = number) -> None:
            settings.tick_part(number, parts, done, of)

        with one_thread():
            samples[size][title] = measure(dict(contenders(module, *SIZES[size])), rounds, tick)
    try:
        of_traceml, told["TraceML"] = traceml(settings.rounds(quick=1, full=3), settings.rounds(quick=1, full=9))
    except ImportError as error:
        left_out[TITLES["traceml"]] = str(error)
    else:
        for size in SIZES:
            samples[size][TRACEML] = of_traceml[size]
    return [CostFigures(f"A step of {size}: what measuring adds", samples[size], told, left_out) for size in SIZES]


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


def traceml(rounds: int, repeats: int) -> tuple[Mapping[str, Samples], Told]:
    """Train with TraceML and without it, in turn: samples by the size of the step.

    Raises:
        ImportError: TraceML is not installed.
    """
    peer = importlib.import_module("benchmarks.peers.traceml")
    sizes = dict(SIZES.values())
    samples: dict[str, Samples] = {size: {ALONE: [], "TraceML": []} for size in SIZES}
    for _ in range(rounds):
        for name in (ALONE, "TraceML"):
            found, printed = peer.seconds(sizes, repeats, with_traceml=name != ALONE)
            if name != ALONE:
                peer.TOLD.check(name, printed)
            for size, times in zip(SIZES, found, strict=True):
                samples[size][name].append(statistics.median(times))
    return samples, peer.TOLD
