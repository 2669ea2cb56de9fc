"""Measure the time that each system adds per iteration to the bare loop, on the digits job with every feature on.

Features: loss and learning rate written at every iteration, an exponential moving average, a cosine schedule stepped at
every iteration, and a checkpoint (model, average, optimizer, schedule) every 100 iterations. The clock starts at the
first batch and stops when the run has returned with everything written. The job is one long epoch, and then short epochs.
``--parts`` measures each hook alone instead.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

from benchmarks.digits import CHECKPOINT_INTERVAL, Job
from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Settings, measure, one_thread
from benchmarks.peers import handwritten, load, trainbus

PEERS = ("ignite", "mmengine", "lightning")
BARE, FLOOR, HAND_WRITTEN = "bare loop", "arithmetic inline", "hand-written loop"
BATCHES_PER_EPOCH = 56
BATCH_SIZE = 32  # of the job by epochs: 56 batches of the 1,797 images

Train = Callable[[Job, Path], None]


def run(settings: Settings) -> list[Comparison]:
    if settings.parts:
        return [parts(settings)]
    modules, left_out = load(PEERS)
    full: dict[str, tuple[Train, ModuleType | None]] = {
        BARE: (handwritten.train_bare, None),
        FLOOR: (handwritten.train_floor, None),
        SUBJECT: (trainbus.train, trainbus),
        HAND_WRITTEN: (handwritten.train, handwritten),
        **{name: (module.train, module) for name, module in modules.items()},
    }
    empty: dict[str, tuple[Train, ModuleType | None]] = {
        BARE: (handwritten.train_bare, None),
        FLOOR: (handwritten.train_floor, None),
        SUBJECT: (partial(trainbus.train, hooks=()), None),
        f"{SUBJECT}, run.train": (trainbus.train_own_loop, None),
    }
    # Runs are long enough that set-up and the last write are negligible.
    iterations, epochs = (100, 2) if settings.quick else (1000, 20)
    long_epoch = partial(Job, iterations)
    short_epochs = partial(Job, epochs * BATCHES_PER_EPOCH, epochs=epochs, batch_size=BATCH_SIZE)
    rounds = settings.rounds(quick=2, full=25)
    # The loop by hand is what people have, though its checkpoints are not synced to the disk.
    jobs = [
        ("Everything on: added per iteration over the bare loop", full, long_epoch, HAND_WRITTEN, Budget(4, 1.5)),
        (f"The same in {epochs} epochs of {BATCHES_PER_EPOCH} iterations", full, short_epochs, HAND_WRITTEN, Budget(4, 1.5)),
        ("No hook at all: added per iteration over the bare loop", empty, long_epoch, FLOOR, Budget("4b", 0.27, seconds=12e-6)),
    ]
    comparisons = []
    for part, (title, contenders, job, floor, budget) in enumerate(jobs):

        def tick(done: int, of: int, part: int = part) -> None:
            settings.tick_part(part, len(jobs), done, of)

        phases = {name: phase(train, job, wrote) for name, (train, wrote) in contenders.items()}
        with one_thread():
            samples = measure(phases, rounds, tick)
        comparisons.append(Comparison(title, "µs", floor, samples, BARE, budget, left_out if contenders is full else {}))
    return comparisons


def parts(settings: Settings) -> Comparison:
    """Measure the empty loops, each hook alone, and everything, in one run; all are added to the bare loop."""
    alone = {f"TrainLoop + {name} only": partial(trainbus.train, hooks=(name,)) for name in trainbus.HOOKS}
    contenders: Mapping[str, Train] = {
        BARE: handwritten.train_bare,
        FLOOR: handwritten.train_floor,
        HAND_WRITTEN: handwritten.train,
        "run.train without hooks": trainbus.train_own_loop,
        "TrainLoop without hooks": partial(trainbus.train, hooks=()),
        **alone,
        "TrainLoop, everything": trainbus.train,
    }
    job = partial(Job, 100 if settings.quick else 1000)
    with one_thread():
        samples = measure(
            {name: phase(train, job) for name, train in contenders.items()}, settings.rounds(quick=2, full=11), settings.tick
        )
    return Comparison("What each part adds per iteration over the bare loop", "µs", FLOOR, samples, BARE)


def phase(train: Train, make: Callable[[], Job], wrote: ModuleType | None = None) -> Sample:
    """Run once on a fresh model in a fresh directory, and check that the required files were written."""

    def sample() -> float:
        job = make()
        with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
            train(job, Path(directory))
            seconds = time.perf_counter() - job.data.started
            if wrote is not None:
                check_files(wrote, Path(directory), job.iterations)
        return seconds / job.iterations

    return sample


def check_files(module: ModuleType, directory: Path, iterations: int) -> None:
    """Check that no contender left work out.

    Raises:
        RuntimeError: too few or too many checkpoints, or too few lines of scalars.
    """
    checkpoints = len(list(directory.glob(module.CHECKPOINTS)))
    lines = sum(len(path.read_text().splitlines()) for path in directory.glob(module.SCALARS))
    if checkpoints != iterations // CHECKPOINT_INTERVAL or lines < iterations:
        files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        counts = f"{checkpoints} checkpoints and {lines} lines of scalars in {iterations} iterations"
        raise RuntimeError(f"{module.__name__} wrote {counts}: {files}")
