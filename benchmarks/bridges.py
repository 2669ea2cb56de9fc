"""Measure the time that a bus adds to an iteration of another library's trainer.

Each trainer trains a tiny model in these ways: alone, with an empty callback, with a bus without subscribers, with an inline
no-op handler of all events, and with everything on (scalars of every iteration, EMA, a check of the loss). All ways of a
trainer alternate in one process, each time with a new trainer. The figure of a training is the median of its iterations, from
the beginning of one forward pass to the next. The added time is the difference within a round.
"""

import inspect
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from benchmarks.bridge_figures import ALONE, EMPTY, EVERYTHING, NO_OP, BridgeFigures
from benchmarks.digits import MOMENTUM
from benchmarks.harness import SUBJECT, Sample, Samples, Settings, measure, one_thread
from benchmarks.trainers import load
from benchmarks.trainers.job import Job, Rows
from trainbus.eventloop import Bus, Event
from trainbus.hooks import CheckInvalidLossHook, EMAHook, JSONLinesWriter, LoggerHook, RuntimeInfoHook

ROWS = Rows(number=2, width=4)
WARMING = 20  # iterations

MakeBus = Callable[[], Bus]


def run(settings: Settings) -> list[BridgeFigures]:
    modules, left_out = load()
    modules = {title: module for title, module in modules.items() if hasattr(module, "train_with")}
    rounds, iterations = settings.rounds(quick=1, full=25), 60 if settings.quick else 500
    samples: dict[str, Samples] = {}
    for number, (title, module) in enumerate(modules.items()):

        def tick(done: int, of: int, number: int = number) -> None:
            settings.tick_part(number, len(modules), done, of)

        with one_thread():
            samples[title] = measure(dict(contenders(module, iterations)), rounds, tick)
    return [BridgeFigures(samples, left_out)]


def contenders(module: ModuleType, iterations: int) -> Iterator[tuple[str, Sample]]:
    yield ALONE, partial(per_iteration, module.train_with, iterations)
    if "callback" in inspect.signature(module.train_with).parameters:
        yield EMPTY, partial(per_iteration, partial(module.train_with, callback=True), iterations)
    buses: Mapping[str, MakeBus] = {SUBJECT: Bus, NO_OP: no_op, EVERYTHING: everything}
    for name, make in buses.items():
        yield name, partial(per_iteration, module.train_with, iterations, make)


def no_op() -> Bus:
    bus = Bus()
    bus.on(Event, lambda event: None)
    return bus


def everything() -> Bus:
    bus = Bus()
    bus.add(RuntimeInfoHook(), EMAHook("ExponentialMovingAverage", momentum=MOMENTUM), CheckInvalidLossHook())
    bus.add(LoggerHook(interval=1, writers=[JSONLinesWriter()]))
    return bus


def per_iteration(train: Callable[..., object], iterations: int, make: MakeBus | None = None) -> float:
    """Train a new model; return the median of the seconds per iteration."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
        job = Job(model, optimizer, iterations, ROWS, Path(directory))
        train(job, **({} if make is None else {"bus": make()}))
    if len(model.begun) != iterations:
        raise RuntimeError(f"{train} trained {len(model.begun)} iterations, not {iterations}")
    return statistics.median(end - begin for begin, end in pairwise(model.begun[WARMING:]))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(ROWS.width, 1)
        self.begun: list[float] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.begun.append(time.perf_counter())
        return {"loss": self.net(x).square().mean()}
