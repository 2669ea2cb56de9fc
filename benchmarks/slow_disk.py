"""The digits job with checkpoints of 18 MB on a disk of 20 MB/s, in the loop of each system, over the bare loop.

Every feature is on, as in ``training``, with a larger model and larger batches. The wait for pending writes after the last
iteration is included. In the first scenario, a checkpoint is due every 2.4 s, of which the disk is busy for 0.9 s. The last one
is due after the last iteration, where no step can hide it: with 24 checkpoints a minute, this alone makes 1.6 %. In the second,
checkpoints are due four times as often as the disk can take them. For the disk, see ``throttle``. All of this runs in one
separate process. The bare loop and the arithmetic run between all others, for a shorter time, because they wait for no disk.

Every file is loaded and must hold the weights of an iteration after which one was due, as a hook of the optimizer saw them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import throttle
from benchmarks.digits import Job
from benchmarks.harness import SUBJECT, Budget, Comparison, Samples, Settings, Tick, one_thread, paused_gc
from benchmarks.peers import handwritten, load, trainbus

PEERS = ("ignite", "mmengine", "lightning")
BARE, ARITHMETIC = "bare loop", "arithmetic inline"
BATCH_SIZE = 384
"""Large enough that the arithmetic of the features is a small part of a step; another benchmark measures that."""

Train = Callable[[Job, Path], None]
Contender = tuple[Train, ModuleType]


@dataclass(frozen=True)
class Scenario:
    """The times at which checkpoints are due."""

    title: str
    seconds: float
    """Seconds of the bare loop from one checkpoint to the next."""
    due: int
    dropping: bool = False
    """Whether contenders that may skip checkpoints take part."""
    budget: Budget | None = None
    hidden: int = 1024
    """Makes 1.1 M weights: 18 MB with their average and AdamW's two moments."""
    ground: int = 160
    """Iterations of a loop that saves nothing, each time that it runs between the others: some seconds, or its own noise of
    several percent is all that the ratios tell."""

    def job(self, iterations: int, interval: int = 1) -> Job:
        return Job(iterations, hidden=self.hidden, batch_size=BATCH_SIZE, checkpoint_interval=interval)


class Figures(msgspec.Struct):
    """The result of a scenario: seconds per iteration, and the number of committed checkpoints of a run."""

    samples: Samples
    committed: dict[str, int]


def scenarios(settings: Settings) -> list[Scenario]:
    if settings.quick:
        small = {"hidden": 192, "ground": 10}
        return [
            Scenario("1 MB every 0.2 s on a disk of 20 MB/s", 0.2, 2, **small),
            Scenario("1 MB every 0.02 s, which is more than it can take", 0.02, 2, dropping=True, **small),
        ]
    return [
        Scenario("18 MB every 2.4 s on a disk of 20 MB/s", 2.4, 24, budget=Budget(5, 1.05)),
        Scenario("18 MB every 0.225 s, which is more than it can take", 0.225, 8, dropping=True),
    ]


def compare(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    """Run everything in a process with a slow disk.

    Raises:
        NoThrottleError: disks cannot be throttled on this machine.
    """
    out = directory / "figures.json"
    arguments = [str(out), *(["--quick"] if settings.quick else [])]
    with throttle.throttled(__name__, *arguments, directory=directory) as process:
        for line in process.stdout or ():
            if line.startswith("done "):
                tick(*map(int, line.split()[1:]))
    measured = msgspec.json.decode(out.read_bytes(), type=list[Figures])
    return [comparison(figures, scenario) for figures, scenario in zip(measured, scenarios(settings), strict=True)]


def comparison(figures: Figures, scenario: Scenario) -> Comparison:
    remarks = {name: f"{number} of {scenario.due} committed" for name, number in figures.committed.items()}
    _, left_out = load(PEERS)
    title = f"{scenario.title}: an iteration"
    return Comparison(title, "ms", BARE, figures.samples, budget=scenario.budget, left_out=left_out, remarks=remarks)


# ------------------------------------------------------------------------------------------------- in the other process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_disk")
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    planned = scenarios(Settings(options.quick))
    with one_thread():
        bare(planned[0])  # everything for the first time
        figures = [run(scenario, part, len(planned)) for part, scenario in enumerate(planned)]
    options.out.write_bytes(msgspec.json.encode(figures))


def run(scenario: Scenario, part: int, parts: int) -> Figures:
    """Run each system once, and between them the loops that save nothing.

    A run takes so long that the machine's speed may change. So each run is divided by the bare loops right before and after
    it, and multiplied by their median.
    """
    interval = max(1, round(scenario.seconds / statistics.median(bare(scenario) for _ in range(3))))
    systems = contenders(dropping=scenario.dropping)
    bares, floors = [bare(scenario)], []
    ratios, committed = {}, {}
    for number, (name, (train, module)) in enumerate(systems.items(), start=1):
        took, committed[name] = saving(train, module, scenario.job(interval * scenario.due, interval))
        if committed[name] != scenario.due and name not in DROPPING:
            raise RuntimeError(f"{name} committed only {committed[name]} of {scenario.due} checkpoints")
        bares.append(bare(scenario))
        floors.append(seconds(handwritten.train_floor, scenario.job(scenario.ground), Path()) / bares[-1])
        ratios[name] = took / statistics.mean(bares[-2:])
        print("done", part * len(systems) + number, parts * len(systems), flush=True)
    ratios = {BARE: 1.0, ARITHMETIC: statistics.median(floors), **ratios}
    return Figures({name: [ratio * statistics.median(bares)] for name, ratio in ratios.items()}, committed)


def contenders(*, dropping: bool) -> dict[str, Contender]:
    modules, _ = load(PEERS)
    others: dict[str, Contender] = {"hand-written loop": (handwritten.train, handwritten)}
    others |= {name: (module.train, module) for name, module in modules.items()}
    ours: dict[str, Contender] = {SUBJECT: (trainbus.train, trainbus), **(DROPPING if dropping else OVERLAPPING)}
    return ours | others


OVERLAPPING: dict[str, Contender] = {f"{SUBJECT}, overlap": (partial(trainbus.train, staging="overlap"), trainbus)}
DROPPING: dict[str, Contender] = {
    f"{SUBJECT}, busy={busy!r}": (partial(trainbus.train, busy=busy), trainbus) for busy in ("skip", "replace")
}


def bare(scenario: Scenario) -> float:
    """Return the seconds of an iteration of the bare loop."""
    return seconds(handwritten.train_bare, scenario.job(scenario.ground), Path())


def seconds(train: Train, job: Job, work_dir: Path) -> float:
    """Return the seconds per iteration, including the wait after the last one."""
    with paused_gc():
        train(job, work_dir)
        return (time.perf_counter() - job.data.started) / job.iterations


def saving(train: Train, module: ModuleType, job: Job) -> tuple[float, int]:
    """Run with checkpoints; return the seconds of an iteration, and the number of checkpoints."""
    with tempfile.TemporaryDirectory() as directory, witnessed(job) as seen:
        before = throttle.written()
        took = seconds(train, job, Path(directory))
        paths = sorted(Path(directory).glob(module.CHECKPOINTS))
        check(module, paths, seen, throttle.written() - before)
        return took, len(paths)


@contextmanager
def witnessed(job: Job) -> Iterator[dict[int, list[Tensor]]]:
    """Return the weights after each step with a due checkpoint, which are the same for all systems."""
    seen: dict[int, list[Tensor]] = {}
    steps = 0

    def look(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps % job.checkpoint_interval == 0:
            seen[steps] = [parameter.detach().clone() for parameter in job.model.parameters()]

    handle = register_optimizer_step_post_hook(look)
    yield seen
    handle.remove()


def check(module: ModuleType, paths: list[Path], seen: dict[int, list[Tensor]], paid: int) -> None:
    """Check that all files went through the slow disk and hold the right weights.

    Raises:
        RuntimeError: a file bypassed the slow disk, holds weights of another moment, or the same weights as another file.
    """
    total = sum(path.stat().st_size for path in paths)
    if paid < total:
        raise RuntimeError(f"{module.__name__} wrote {paid:,} bytes to the slow disk, but its files have {total:,}")
    moments = [moment(list(module.weights(path)), seen) for path in paths]
    if None in moments or len(set(moments)) < len(paths):
        raise RuntimeError(f"{module.__name__}: {[path.name for path in paths]} are of the iterations {moments}")


def moment(weights: list[Tensor], seen: dict[int, list[Tensor]]) -> int | None:
    """Return the iteration after which all weights had these values."""
    for iteration, then in seen.items():
        if len(weights) == len(then) and all(map(torch.equal, weights, then)):
            return iteration
    return None


if __name__ == "__main__":
    main()
