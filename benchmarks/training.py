"""The digits job with every feature on, in each system's loop: what is added per iteration to the bare loop.

Features: loss and learning rate written at every iteration, an exponential moving average, a cosine schedule stepped at
every iteration, and a checkpoint (model, average, optimizer, schedule) every 100 iterations. The clock starts at the
first batch and stops when the run has returned with everything written.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from benchmarks.digits import CHECKPOINT_INTERVAL, Job
from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Settings, measure, one_thread
from benchmarks.peers import handwritten, load, trainbus

PEERS = ("ignite", "mmengine", "lightning")
BARE, FLOOR = "bare loop", "arithmetic inline"

Train = Callable[[Job, Path], None]


def run(settings: Settings) -> list[Comparison]:
    modules, left_out = load(PEERS)
    iterations = 100 if settings.quick else 1000  # long enough that setting up and the last write do not pass for iterations
    contenders = {
        BARE: phase(handwritten.train_bare, iterations),
        FLOOR: phase(handwritten.train_floor, iterations),
        SUBJECT: phase(trainbus.train, iterations, trainbus),
        "hand-written loop": phase(handwritten.train, iterations, handwritten),
        **{name: phase(module.train, iterations, module) for name, module in modules.items()},
    }
    with one_thread():
        samples = measure(contenders, settings.rounds(quick=2, full=11), settings.tick)
    title = "Everything on: added per iteration over the bare loop"
    return [Comparison(title, "µs", FLOOR, samples, BARE, Budget(4, 2.0), left_out)]


def phase(train: Train, iterations: int, wrote: ModuleType | None = None) -> Sample:
    """One run on a fresh model in a fresh directory; checks that it wrote what everybody has to write."""

    def sample() -> float:
        job = Job(iterations)
        with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
            train(job, Path(directory))
            seconds = time.perf_counter() - job.data.started
            if wrote is not None:
                check_files(wrote, Path(directory), iterations)
        return seconds / iterations

    return sample


def check_files(module: ModuleType, directory: Path, iterations: int) -> None:
    """No contender may win by leaving something out.

    Raises:
        RuntimeError: there are too few or too many checkpoints, or too few lines of scalars.
    """
    checkpoints = len(list(directory.glob(module.CHECKPOINTS)))
    lines = sum(len(path.read_text().splitlines()) for path in directory.glob(module.SCALARS))
    if checkpoints != iterations // CHECKPOINT_INTERVAL or lines < iterations:
        files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        counts = f"{checkpoints} checkpoints and {lines} lines of scalars in {iterations} iterations"
        raise RuntimeError(f"{module.__name__} wrote {counts}: {files}")
