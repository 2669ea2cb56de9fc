"""One process of `savers`: train, save regularly, and record the duration of each step and when each file is durable.

A step is the time from the beginning of one forward pass to the beginning of the next, including all work of the trainer. A
checkpoint is durable when it has its name and a thread has synced it, so a trainer gains nothing by leaving out the sync.
Before the next checkpoint the training waits for it, and copies the same tensors into memory that was touched before: the
floor. The first checkpoint is checked. The process ends after the last one, before any further work of its trainer.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.saving import sync
from benchmarks.trainers import Way, load
from benchmarks.trainers.job import Job, Rows

RESULT = "result.json"
LAYERS_PER_STEP = 2
COPIES = 3
PATIENCE, LOOK = 120.0, 0.002  # seconds
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """A model of a number of linear layers, and the parameters of its training."""

    name: str
    layers: int
    width: int
    rows: int
    """Of a batch."""
    interval: int
    """Steps from one checkpoint to the next."""
    saves: int
    """With the first one, which does not count."""


class Run(msgspec.Struct):
    """The measurements of one process; in seconds."""

    interval: int
    steps: list[float]
    copies: list[float] = []
    durable: list[float] = []
    """Time from the end of the step before, without that step's save."""


class Layers(nn.Module):
    """Linear layers of which each step uses a few, in turn, so that a step of a large model is short, too."""

    def __init__(self, size: Size, tick: Callable[[], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.layers))
        self.tick = tick
        self.turn = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.tick()
        for _ in range(LAYERS_PER_STEP):
            x = self.layers[self.turn](x).relu()
            self.turn = (self.turn + 1) % len(self.layers)
        return {"loss": x.square().mean()}


class SaveJob(Job):
    """The training job; a trainer's module runs it."""

    def __init__(self, size: Size, directory: Path, tick: Callable[[], object]) -> None:
        model = Layers(size, tick)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        super().__init__(model, optimizer, size.interval * (size.saves + 1), Rows(size.rows, size.width), directory)
        self.interval = size.interval
        self._prime()

    def tensors(self) -> list[Tensor]:
        """The weights, and then the optimizer's averages."""
        weights = list(self.model.parameters())
        return [weight.detach() for weight in weights] + [
            self.optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq") for weight in weights
        ]

    def _prime(self) -> None:
        """Make the optimizer create the state of all layers, which it would else do when each is first used."""
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Stopwatch:
    """Record the times; called at the beginning of each step."""

    size: Size
    directory: Path
    way: Way
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    """By the clock."""
    copies: list[float] = field(default_factory=list)
    floor: "Copy" = field(init=False)
    watcher: threading.Thread = field(init=False)
    failed: Exception | None = None

    def tick(self) -> None:
        if self.begins:
            self.ends.append(time.perf_counter())
        step, interval = len(self.ends), self.size.interval
        if step and step % interval == 0:
            self.watch(step)
        if step > interval and step % interval == interval - 2:  # the step after this one saves
            self.settle(step // interval)
        self.begins.append(time.perf_counter())

    def watch(self, step: int) -> None:
        """Watch the checkpoint of the step that has just ended, on a thread."""
        number = step // self.size.interval - 1
        if number == 0:
            self.floor()  # to be compared with the file
        path = self.directory / self.way.path.format(step=step, number=number)
        self.watcher = threading.Thread(target=self.await_durable, args=(path,), daemon=True)
        self.watcher.start()

    def await_durable(self, path: Path) -> None:
        try:
            await_name(path)
            sync(path)
            self.durable.append(time.perf_counter())
            if len(self.durable) == 1:
                self.floor.compare(self.way.read(path))
        except Exception as error:  # noqa: BLE001 - raised where the training waits
            self.failed = error

    def settle(self, saves: int) -> None:
        """Wait for the newest checkpoint, and measure the floor."""
        self.watcher.join()
        if self.failed is not None:
            raise self.failed
        self.copies.append(statistics.median(self.floor() for _ in range(COPIES)))
        if saves == self.size.saves:
            self.finish()

    def finish(self) -> None:
        steps = [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]
        usual = statistics.median(steps)
        asked = [self.begins[number * self.size.interval - 1] + usual for number in range(1, self.size.saves + 1)]
        durable = [then - asking for then, asking in zip(self.durable, asked, strict=True)]
        run = Run(self.size.interval, steps, self.copies, durable)
        (self.directory / RESULT).write_bytes(msgspec.json.encode(run))
        os._exit(0)


def await_name(path: Path) -> None:
    """Wait until a file of this name exists.

    Raises:
        TimeoutError: it does not exist after two minutes.
    """
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} is missing after {PATIENCE:.0f} s; found {sorted(path.parent.iterdir())}")
        time.sleep(LOOK)


class Copy:
    """One copy of all tensors into memory that is there; seconds."""

    def __init__(self, job: SaveJob) -> None:
        self.sources = job.tensors()
        self.targets = [torch.zeros_like(tensor) for tensor in self.sources]
        self.names = [name for name, _ in job.model.named_parameters()]

    def __call__(self) -> float:
        start = time.perf_counter()
        torch._foreach_copy_(self.targets, self.sources)
        return time.perf_counter() - start

    def compare(self, saved: Mapping[str, Tensor]) -> None:
        """Raise an error unless these are the weights of the last copy.

        Raises:
            RuntimeError: they differ.
        """
        weights = dict(zip(self.names, self.targets, strict=False))
        wrong = [name for name, weight in weights.items() if name not in saved or not torch.equal(saved[name], weight)]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(weights)} weights differ in the file, such as {wrong[0]}")


def train(title: str, name: str, size: Size, directory: Path) -> None:
    """Train in this way, and end the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    modules, _ = load()
    way = modules[title].SAVERS[name]
    watch = Stopwatch(size, directory, way)
    job = SaveJob(size, directory, watch.tick)
    watch.floor = Copy(job)
    way.train(job)
    raise RuntimeError(f"{name} ended after {len(watch.ends)} steps, before its last checkpoint was durable")
