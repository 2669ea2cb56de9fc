"""The method: everything alternates in many short rounds, and ratios are taken within a round.

On a shared machine the speed drifts by tens of percent within seconds. Two contenders that run one after the other in
the same round see the same drift, so their ratio is stable although both figures move. The median over rounds drops
rounds that another process disturbed in the middle.
"""

import gc
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

SUBJECT = "trainbus"
TIMES = "\N{MULTIPLICATION SIGN}"

LIBRARIES = (
    "trainbus",
    "torch",
    "msgspec",
    "mmengine",
    "tensorboard",
    "mlflow",
    "accelerate",
    "lightning",
    "pytorch-ignite",
    "transformers",
    "traceml-ai",
    "safetensors",
    "fsspec",
    "s3fs",
    "obstore",
    "boto3",
    "s3torchconnector",
    "moto",
    "pluggy",
    "pyee",
    "psygnal",
    "blinker",
    "anyio",
    "bubus",
    "nvidia-resiliency-ext",
    "torchft",
    "ray",
)

Sample = Callable[[], float]
"""Does the work a few times and returns seconds per operation."""

Samples = dict[str, list[float]]
"""Seconds per operation, one entry a round, by contender."""

Tick = Callable[[int, int], None]
"""Called after every round with the number of finished rounds and of all rounds."""


@dataclass(frozen=True)
class Settings:
    """The length of the measurement."""

    quick: bool = False
    parts: bool = False
    """Measure each hook of ``training`` by itself instead."""
    tick: Tick = lambda done, rounds: None

    def tick_part(self, part: int, parts: int, done: int, rounds: int) -> None:
        """Report the progress of one of several parts of a benchmark; ``part`` counts from 0."""
        self.tick(part * rounds + done, parts * rounds)

    def rounds(self, quick: int, full: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Budget:
    """A promise of the design: the subject's figure over the floor's figure is at most ``limit``."""

    row: int | str | None
    """Row in the design's table; None for budgets from elsewhere."""
    limit: float
    seconds: float | None = None
    """Limit for the subject's own figure, if the budget is not a multiple of the floor."""


@dataclass(frozen=True)
class Row:
    """One contender's figures; seconds per operation."""

    name: str
    median: float
    minimum: float
    ratio: float
    """Ratio to the floor."""
    quartiles: tuple[float, float]
    """Of the ratio over the rounds; of the figure over the floor's median where a baseline was taken off."""


@dataclass(frozen=True)
class Comparison:
    """The measurements of a benchmark under one condition: seconds per operation, by contender, one entry a round."""

    title: str
    unit: str
    floor: str
    samples: Samples
    baseline: str | None = None
    """A contender whose time is subtracted from all others in the same round; the rows are then *added* time."""
    budget: Budget | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that could not take part, with the reason."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Notes on contenders, a word or two each."""

    chart: ClassVar[str] = "chart"
    """The module that draws it."""

    def rows(self) -> list[Row]:
        """The figures of all contenders, in the order they ran."""
        return [self._row(name) for name in self.samples if name != self.baseline]

    def raw(self) -> dict[str, tuple[float, float]]:
        """Median and minimum of every contender as measured, the baseline included and not taken off."""
        return {name: (statistics.median(times), min(times)) for name, times in self.samples.items()}

    def verdict(self) -> bool | None:
        """Whether the budget is met; None without a budget or a subject."""
        if self.budget is None or SUBJECT not in self.samples:
            return None
        row = self._row(SUBJECT)
        return row.ratio <= self.budget.limit if self.budget.seconds is None else row.median <= self.budget.seconds

    def _row(self, name: str) -> Row:
        times, floor = self._cost(name), self._cost(self.floor)
        if self.baseline is None:
            ratios = [time / ground for time, ground in zip(times, floor, strict=True)]
            ratio = statistics.median(ratios)
        else:
            # A difference of two noisy times can pass through zero, so its ratio within a round means nothing: take
            # the differences within the round, and the ratio of their medians.
            ratios = [time / statistics.median(floor) for time in times]
            ratio = statistics.median(times) / statistics.median(floor)
        return Row(name, statistics.median(times), self._minimum(name), ratio, _quartiles(ratios))

    def _cost(self, name: str) -> list[float]:
        if self.baseline is None:
            return self.samples[name]
        return [time - bare for time, bare in zip(self.samples[name], self.samples[self.baseline], strict=True)]

    def _minimum(self, name: str) -> float:
        return min(self.samples[name]) - (min(self.samples[self.baseline]) if self.baseline else 0.0)


def in_blocks(settings: Settings, blocks: int, measure_block: Callable[[Tick], Samples]) -> Samples:
    """Measure several times with new contenders, and join the rounds.

    The same work is up to 15 % faster or slower depending on where the allocator puts functions, code and tensors, for as
    long as these live. One set of contenders would measure this luck.
    """
    samples: Samples = {}
    for block in range(1 if settings.quick else blocks):

        def tick(done: int, rounds: int, before: int = block) -> None:
            settings.tick_part(before, blocks, done, rounds)

        for name, times in measure_block(tick).items():
            samples.setdefault(name, []).extend(times)
    return samples


def measure(contenders: Mapping[str, Sample], rounds: int, tick: Tick) -> Samples:
    """Run every contender once per round, in turn, after one round that does not count."""
    samples: Samples = {name: [] for name in contenders}
    # Freeze the objects that exist now, or each collection between the rounds would traverse all of torch.
    gc.collect()
    gc.freeze()
    try:
        for number in range(rounds + 1):
            for name, sample in contenders.items():
                with paused_gc():
                    seconds = sample()
                if number > 0:
                    samples[name].append(seconds)
            tick(number, rounds)
    finally:
        gc.unfreeze()
    return samples


@contextmanager
def paused_gc() -> Iterator[None]:
    """Collect garbage before a block, not in it, where it would count for the contender that happens to trigger it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because on few shared cores a second thread measures other processes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def environment() -> dict[str, object]:
    """Return the machine and the versions, without which figures mean nothing."""
    return {
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": {name: version for name in LIBRARIES if (version := _version(name)) is not None},
    }


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of the measured code, with a + if it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
