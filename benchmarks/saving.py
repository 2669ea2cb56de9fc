"""Measure repeated saves of a model: how long the training stands still, and how long until the file is on disk.

Every contender saves the same float32 tensors, whose values change before each save. The stall ends when training may change
them again. A save is done when its files would survive a power cut. The benchmark syncs every file itself, so that a contender
gains nothing by leaving that out. The first two saves are not timed: they check that a file holds the weights of one step
although the weights change as soon as the stall is over. MMEngine's hook gathers the weights itself; the others get them.

The floor of the stall is one ``torch._foreach_copy_`` of all tensors. One memcpy of as many bytes in a single piece is shown
beside it. With many small tensors it is far below, and no contender can come near it.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Settings, Tick, measure
from benchmarks.peers import Saver, Savers, handwritten, load, trainbus
from trainbus.eventloop.checkpoint import StageBuffer, stage, write

PEERS = ("safetensors", "distributed", "lightning", "mmengine")
FOREACH, MEMCPY, RAW = "one foreach copy", "one memcpy", "raw write + fsync"
CHECKED = 2
"""Saves that are checked and not timed: the first, and one that finds what the first has prepared."""
PATIENCE = 5.0
"""Seconds. A contender that takes longer in the first round is measured once, and its figures count for all rounds."""
SECONDS_PER_SAMPLE, MOST = 0.5, 7
"""Seconds of a sample, and its largest number of saves. A sample is the median of the saves that fit in."""
CHUNK = 16 << 20  # bytes per call of write()

_numbers = count(1)


@dataclass(frozen=True)
class Size:
    """The number, the size and the place of the saved tensors."""

    tensors: int
    elements: int
    device: str = "cpu"

    def __str__(self) -> str:
        each = f"{self.elements // 1_000_000} M" if self.elements >= 1_000_000 else f"{self.elements:,}"
        return f"{self.tensors:,} tensors of {each}, {self.bytes / 1e6:,.0f} MB"

    @property
    def bytes(self) -> int:
        return 4 * self.tensors * self.elements

    def model(self) -> nn.Module:
        return nn.ParameterList([torch.zeros(self.elements, device=self.device) for _ in range(self.tensors)])


def sizes(settings: Settings) -> tuple[Size, Size]:
    """Few large tensors, and many small ones."""
    return (Size(8, 1_000_000), Size(400, 1000)) if settings.quick else (Size(200, 1_000_000), Size(20_000, 1000))


def saves(settings: Settings, size: Size, directory: Path, tick: Tick) -> list[Comparison]:
    """The stall, and the time until the disk has it, of the same saves."""
    model, rounds = size.model(), settings.rounds(quick=1, full=3)
    with ExitStack() as scopes:
        savers, left_out = prepared(scopes, model, directory)
        savings = {name: Saving(saver, model, size, directory) for name, saver in savers.items()}
        for name, saving in savings.items():
            try:
                saving()
            except Exception as error:
                raise RuntimeError(f"{name} failed to save {size}") from error
        floors = {FOREACH: foreach_copy(model), MEMCPY: memcpy(model, size), RAW: raw_write(size, directory)}
        samples = measure({**floors, **savings}, rounds, tick)
    stalls = {name: times for name, times in samples.items() if name != RAW}
    totals = {RAW: samples[RAW]} | {name: saving.totals[-rounds:] for name, saving in savings.items()}
    return [
        Comparison(f"Training stands still: {size}", "ms", FOREACH, stalls, budget=Budget(6, 1.3), left_out=left_out),
        Comparison(f"Until the disk has it: {size}", "ms", RAW, totals, left_out=left_out),
    ]


def prepared(scopes: ExitStack, model: nn.Module, directory: Path) -> tuple[dict[str, Saver], dict[str, str]]:
    """Return all ways to save, and the reasons for those that cannot."""
    modules, left_out = load(PEERS)
    ways: dict[str, Savers] = {**trainbus.SAVERS, **handwritten.SAVERS}
    for module in modules.values():
        ways |= module.SAVERS
    savers = {}
    for name, way in ways.items():
        work_dir = directory / f"scratch_{next(_numbers)}"
        work_dir.mkdir()
        try:
            savers[name] = scopes.enter_context(way(model, work_dir))
        except OSError as error:
            left_out[name] = str(error)
    return savers, left_out


class Saving:
    """One contender's saves; called for a sample of the stall, it notes the time until the disk has it as well."""

    def __init__(self, saver: Saver, model: nn.Module, size: Size, directory: Path) -> None:
        self.saver = saver
        self.weights = [tensor.detach() for tensor in model.parameters()]
        self.size = size
        self.directory = directory
        self.totals: list[float] = []
        self.first: tuple[float, float] | None = None

    def __call__(self) -> float:
        stall, total = self.sample()
        self.first = self.first or (stall, total)
        self.totals.append(total)
        return stall

    def sample(self) -> tuple[float, float]:
        if self.first is not None and self.first[1] > PATIENCE:
            return self.first
        if len(self.totals) < CHECKED:
            return self.save(check=True)
        times = [self.save()]
        while len(times) < MOST and sum(total for _, total in times) < SECONDS_PER_SAMPLE:
            times.append(self.save())
        stalls, totals = zip(*times, strict=True)
        return statistics.median(stalls), statistics.median(totals)

    def save(self, *, check: bool = False) -> tuple[float, float]:
        """Save once and remove the file; return the seconds of the stall, and until the file is on disk."""
        step = next(_numbers)
        path = self.directory / f"save_{step}"
        fill(self.weights, step)
        start = time.perf_counter()
        self.saver.save(path)
        stall = time.perf_counter() - start
        if check:
            fill(self.weights, step + 0.5)  # the next update
        start = time.perf_counter()
        self.saver.settle()
        sync(path)
        rest = time.perf_counter() - start
        if check:
            self.check(path, step)
        if on_disk(path) < self.size.bytes:
            raise RuntimeError(f"{path} holds {on_disk(path):,} of {self.size.bytes:,} bytes")
        remove(path)
        return stall, stall + rest

    def check(self, path: Path, step: int) -> None:
        """Raise an error unless these are all the weights, of this step.

        Raises:
            RuntimeError: they differ.
        """
        loaded = list(self.saver.read(path))
        values = {float(value) for tensor in loaded for value in (tensor.min(), tensor.max())}
        if [tensor.shape for tensor in loaded] != [tensor.shape for tensor in self.weights] or values != {step}:
            raise RuntimeError(f"{len(loaded)} tensors of {len(self.weights)} with the values {sorted(values)[:5]}, not {step}")


# ------------------------------------------------------------------------------------------------- commit throughput


def commits(settings: Settings, size: Size, directory: Path, tick: Tick) -> Comparison:
    """Measure writing a staged tree with its digest, beside writing as many bytes without any work."""
    weights = list(size.model().parameters())
    buffer = StageBuffer()

    def commit() -> float:
        fill([weight.detach() for weight in weights], next(_numbers))
        staged = stage({"weights": weights}, buffer)
        path = directory / f"commit_{next(_numbers)}"
        start = time.perf_counter()
        write(staged, path)
        seconds = time.perf_counter() - start
        remove(path)
        return seconds

    contenders = {RAW: raw_write(size, directory), SUBJECT: commit}
    samples = measure(contenders, settings.rounds(quick=2, full=31), tick)
    rates = {name: f"{size.bytes / statistics.median(times) / 1e9:.2f} GB/s" for name, times in samples.items()}
    budget = Budget(None, 1 / 0.85)
    return Comparison(f"Commit, digest included: {size}", "ms", RAW, samples, budget=budget, remarks=rates)


# ----------------------------------------------------------------------------------------------------------- floors


def foreach_copy(model: nn.Module) -> Sample:
    """Copy all tensors into existing memory, in one call."""
    weights = [tensor.detach() for tensor in model.parameters()]
    flat = torch.zeros(sum(weight.numel() for weight in weights))
    views = flat.split([weight.numel() for weight in weights])
    return timed(weights, lambda: torch._foreach_copy_(views, weights))


def memcpy(model: nn.Module, size: Size) -> Sample:
    """Copy as many bytes in one piece."""
    source, target = torch.zeros(2, size.bytes, dtype=torch.uint8)
    return timed([source], lambda: target.copy_(source))


def timed(weights: list[Tensor], work: Callable[[], object]) -> Sample:
    def once() -> float:
        fill(weights, 1)  # as the savers find them
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def sample() -> float:
        times = [once()]
        while len(times) < MOST and sum(times) < SECONDS_PER_SAMPLE:
            times.append(once())
        return statistics.median(times)

    return sample


def raw_write(size: Size, directory: Path) -> Sample:
    """Write as many bytes from memory in large pieces, and sync once."""
    data = memoryview(torch.ones(size.bytes, dtype=torch.uint8).numpy())

    def sample() -> float:
        path = directory / f"raw_{next(_numbers)}"
        start = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for begin in range(0, len(data), CHUNK):
            rest = data[begin : begin + CHUNK]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - start
        remove(path)
        return seconds

    return sample


# ------------------------------------------------------------------------------------------------- weights and files


@torch.no_grad()
def fill(weights: list[Tensor], value: float) -> None:
    torch._foreach_zero_(weights)
    if weights[0].dtype.is_floating_point:
        torch._foreach_add_(weights, value)


def files(path: Path) -> Iterator[Path]:
    """Return the files of a checkpoint: one file, or those of a directory."""
    yield from (path.rglob("*") if path.is_dir() else ())
    yield path


def sync(path: Path) -> None:
    """Sync everything at this path, and its name."""
    for each in (*files(path), path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def on_disk(path: Path) -> int:
    return sum(each.stat().st_size for each in files(path) if each.is_file())


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def place() -> Iterator[Path]:
    """A directory for the files of a benchmark, where temporary files go (``TMPDIR``)."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
        yield Path(directory)
