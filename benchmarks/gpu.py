"""``python -m benchmarks gpu [--quick] [--out DIR]``: rows 3, 4, 6, 8 and 9 of the design on this machine's accelerator, and
the saves of a language model.

The training thread has a clock; what a save adds to the queue of the device is measured by the device's events. Contenders take
turns, as everywhere. Without an accelerator it says so, and ends with status 0. At the end it says what to send.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import beside, language_model, logging, report, saving, training
from benchmarks.digits import ClockedBatches, Job
from benchmarks.handoff import percentile
from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Settings, environment, measure
from benchmarks.peers import HandOff, Logged, Statement, handwritten, stdlib, trainbus
from trainbus.eventloop import device as door
from trainbus.eventloop.checkpoint import Overlap, StageBuffer, stage

STEP_ALONE, STACK = "step alone", "one stack"
SIDE = 1000
"""Rows and columns of the matrices that a step multiplies."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds only, to check that everything runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="default: benchmarks/results")
    options = parser.parse_args(arguments)
    device = door.current_device()
    if device is None or not door.is_asynchronous(device):
        report.console.print("no accelerator with streams is here: nothing to measure")
        return
    where = environment() | {"device": str(device), "devices": door.device_names(), "torch": torch.__config__.show()}
    report.heading(where)
    comparisons = run(Settings(options.quick), device)
    report.tables(comparisons)
    path, *_ = report.save("gpu", comparisons, where, options.quick, options.out)
    report.console.print(
        f"Send in an issue: {path}, the tables above, and what this prints: pytest tests/device tests/offload tests/checkpoint"
    )


def run(settings: Settings, device: torch.device) -> list[Comparison]:
    comparisons = [hand_off(settings, device), *everything_on(settings, device), *scalars(settings, device)]
    for size in saving.sizes(settings):
        there = saving.Size(size.tensors, size.elements, str(device))
        with saving.place() as directory:
            comparisons += saving.saves(settings, there, directory, settings.tick)
        comparisons += queued(settings, there, device)
    with saving.place() as directory:
        comparisons += beside.steps(settings, there, directory, settings.tick)
        comparisons.append(language_model.saves(settings, directory, device))
    return comparisons


# ------------------------------------------------------------------------------------------------------------ row 3


def hand_off(settings: Settings, device: torch.device) -> Comparison:
    """Hand an event to a lane between two steps of the device; the median of a round."""
    matrix = torch.eye(SIDE, device=device)
    with ExitStack() as scopes:
        ways = {
            stdlib.FLOOR: scopes.enter_context(stdlib.append(ignore)),
            SUBJECT: scopes.enter_context(trainbus.thread_lane({}, ignore)),
        }
        contenders = {name: partial(between_steps, way, matrix, settings.rounds(20, 500)) for name, way in ways.items()}
        samples = measure(contenders, settings.rounds(quick=2, full=21), settings.tick)
    return Comparison("Hand-off to a lane between steps of the device, p50", "µs", stdlib.FLOOR, samples, budget=Budget(3, 10))


def between_steps(way: HandOff, matrix: torch.Tensor, number: int) -> float:
    times = []
    for at in range(number):
        event = way.make(at)
        product = matrix @ matrix
        start = time.perf_counter()
        way.publish(event)
        times.append(time.perf_counter() - start)
        del product
        time.sleep(0.0005)  # a step
    door.synchronize(matrix.device)
    return percentile(times, 50)


def ignore(event: object) -> None: ...


# ------------------------------------------------------------------------------------------------------------ row 4


class JobThere(Job):
    """The digits job with its model and its batches on a device."""

    def __init__(self, device: torch.device, iterations: int) -> None:
        super().__init__(iterations)
        self.model.to(device)
        batches = [(images.to(device), labels.to(device)) for images, labels in self.data.batches]
        self.data = ClockedBatches(batches, self.data.length)


def everything_on(settings: Settings, device: torch.device) -> Iterator[Comparison]:
    """What logging, average, schedule and checkpoints add to an iteration; a run ends when the device has done its work."""
    ways: Mapping[str, Callable[[Job, Path], Any]] = {
        training.BARE: handwritten.train_bare,
        training.FLOOR: handwritten.train_floor,
        SUBJECT: trainbus.train,
        training.HAND_WRITTEN: handwritten.train,
    }

    def train(way: Callable[[Job, Path], Any], job: Job, work_dir: Path) -> None:
        way(job, work_dir)
        door.synchronize(device)

    job = partial(JobThere, device, settings.rounds(quick=100, full=1000))
    contenders = {name: training.phase(partial(train, way), job) for name, way in ways.items()}
    samples = measure(contenders, settings.rounds(quick=1, full=15), settings.tick)
    title = "Everything on: added per iteration over the bare loop"
    yield Comparison(title, "µs", training.FLOOR, samples, training.BARE, Budget(4, 2.2))


# ------------------------------------------------------------------------------------------------------------ row 8


def scalars(settings: Settings, device: torch.device) -> Iterator[Comparison]:
    tensors = {name: torch.tensor(0.5 + index / 7, device=device) for index, name in enumerate(logging.NAMES)}
    yield logging.compare(settings, 1, tensors, stacked, STACK, Budget(8, 2.0))


@contextmanager
def stacked(work_dir: Path, values: Mapping[str, object]) -> Iterator[Logged]:
    yield Logged(Statement("stack(tensors)", {"stack": torch.stack, "tensors": tuple(values.values())}))


# ------------------------------------------------------------------------------------------------------------ row 6


def queued(settings: Settings, size: saving.Size, device: torch.device) -> Iterator[Comparison]:
    """What a save adds to a step by the device's events: a foreach copy into pinned memory, ``block`` and ``overlap``."""
    model = size.model()
    weights = [parameter.detach() for parameter in model.parameters()]
    pinned = door.pinned_bytes(size.bytes).view(torch.float32).split([size.elements] * size.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    matrix = torch.eye(SIDE, device=device)
    buffers = StageBuffer(), StageBuffer()

    def step() -> None:
        for _ in range(settings.rounds(quick=2, full=200)):
            torch.mm(matrix, matrix)
        optimizer.step()

    with closing(Overlap([optimizer])) as overlap:
        saves: dict[str, Callable[[], Any]] = {
            STEP_ALONE: lambda: None,
            saving.FOREACH: lambda: torch._foreach_copy_(pinned, weights, non_blocking=True),
            f"{SUBJECT}, block": lambda: stage({"weights": weights}, buffers[0]),
            SUBJECT: lambda: stage({"weights": weights}, buffers[1], overlap=overlap),
        }
        contenders = {name: by_events(device, save, step) for name, save in saves.items()}
        samples = measure(contenders, settings.rounds(quick=1, full=11), settings.tick)
    limit = 0.4 if size.elements == SIDE else 0.15
    title = f"Added to a step of the device by the copy: {size}"
    yield Comparison(title, "ms", saving.FOREACH, samples, STEP_ALONE, Budget(6, limit))


def by_events(device: torch.device, save: Callable[[], Any], step: Callable[[], None]) -> Sample:
    """Time a save and the step after it, from one event of the device to another."""
    module: Any = torch.get_device_module(device)

    def sample() -> float:
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        begin.record(module.current_stream(device))
        staged = save()
        step()
        end.record(module.current_stream(device))
        end.synchronize()
        del staged
        return float(begin.elapsed_time(end)) / 1e3

    return sample
