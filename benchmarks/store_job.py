"""One process of `stores`: train, save now and then, and record what a save costs and when it is durable.

The training stands still until the saving function has returned. At half of the saves it then waits until the save is durable,
so that all ways have the machine for themselves. At the others it continues, and a thread waits for the save; ways that save
at once have none of these. A step is one forward pass, one backward pass and one update of a part of the model. What the
training loses is the time that it stands still, and the time by which the steps beside the save take longer than the others.
Before each save the training copies the weights into memory that was touched before: the floor of standing still. The first
save is compared with the weights of its moment, and does not count otherwise.
"""

import os
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Union

import msgspec
import torch
from torch import Tensor

from benchmarks.peers import Saver
from benchmarks.save_job import COPIES, LEARNING_RATE, RESULT, Layers, Size
from benchmarks.store_disk import Disk

if TYPE_CHECKING:
    from benchmarks.store_server import Server

Place = Union[Disk, "Server"]


class Run(msgspec.Struct):
    """The measurements of one process, in seconds, without its first save."""

    stalls: list[float] = []
    """The time of the saving function."""
    copies: list[float] = []
    durable: list[float] = []
    """From the call of the saving function until the save is durable, while the training waits."""
    beside: list[float] = []
    """The same while the training continues; empty if the saving function returns when the save is durable."""
    lost: list[float] = []
    """By a training that continues."""


class Training:
    """Steps of a small part of a model."""

    def __init__(self, size: Size) -> None:
        self.model = Layers(size, lambda: None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE)
        self.batch = torch.ones(size.rows, size.width)
        self.weights = [weight.detach() for weight in self.model.parameters()]
        self.copies = [torch.zeros_like(weight) for weight in self.weights]

    def step(self) -> float:
        """Train; return the seconds."""
        start = time.perf_counter()
        self.model(self.batch)["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def copy(self) -> float:
        """Copy all weights; return the seconds."""
        start = time.perf_counter()
        torch._foreach_copy_(self.copies, self.weights)
        return time.perf_counter() - start

    def compare(self, size: int, saved: Iterable[Tensor]) -> None:
        """Check what was saved: its size in bytes, and that it is the weights of the last copy.

        Raises:
            RuntimeError: it differs.
        """
        if size < (least := sum(weight.nbytes for weight in self.weights)):
            raise RuntimeError(f"{size:,} bytes were saved, and the weights have {least:,}")
        wrong = sum(not torch.equal(weight, copy) for weight, copy in zip(saved, self.copies, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {len(self.copies)} weights differ in the file")


def measure(place: Place, name: str, size: Size, directory: Path) -> None:
    """Save in this way, write the figures into the directory, and end the process.

    Args:
        place: where to save: a ``Disk``, or a ``Server`` (see ``store_server``).
        name: one of ``place.ways()``.
        size: of the model; ``interval`` steps before each save.
        directory: for ``RESULT``.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place.enter()
    training, run = Training(size), Run()
    ways, _ = place.ways()
    with ways[name](training.model, directory) as saver, ThreadPoolExecutor(1) as pool:

        def save(number: int, *, check: bool = False, beside: bool = False) -> None:
            usual = statistics.median(training.step() for _ in range(size.interval))
            copy = statistics.median(training.copy() for _ in range(COPIES))
            where = place.where(number)
            start = time.perf_counter()
            saver.save(where)
            stall = time.perf_counter() - start
            end = pool.submit(settle, place, saver, where)
            steps = [training.step()] if beside or check else []
            while beside and not end.done():
                steps.append(training.step())
            durable = end.result() - start
            if check:
                training.compare(place.bytes(where), training.copies if name == place.floor else saver.read(where))
            else:
                run.stalls.append(stall)
                run.copies.append(copy)
                (run.beside if beside else run.durable).append(durable)
            if beside:
                run.lost.append(stall + sum(steps) - len(steps) * usual)
            place.remove(where)

        save(0, check=True)
        for number in range(1, 1 + (size.saves - 1) * place.more):
            save(2 * number)
            if saver.background:
                save(2 * number + 1, beside=True)
        (directory / RESULT).write_bytes(msgspec.json.encode(run))
        os._exit(0)


def settle(place: Place, saver: Saver, where: Path) -> float:
    """Wait until a save is durable; return the time by the clock."""
    saver.settle()
    place.sync(where)
    return time.perf_counter()
