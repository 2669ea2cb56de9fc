"""Small parts that the tests of training share: a model, data, a step, and a trace of what a bus publishes."""

import itertools
import re
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import dataloader

from trainbus.eventloop import Bus, Event, Run, TrainLoop

Batch = tuple[torch.Tensor, torch.Tensor]

INSIDE_AN_ITERATION = {f"{when}_{what}" for when in ("before", "after") for what in ("forward", "backward", "optimizer_step")}


MOUNT_POINTS = [
    *("before_run", "before_train", "before_train_epoch", "before_train_iter", "before_forward", "after_forward"),
    *("after_train_iter", "before_backward", "after_backward", "before_optimizer_step", "after_optimizer_step"),
    *("after_train_epoch", "before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch"),
    *("after_val", "after_train", "after_run"),
]
"""Those of a training."""


class Trace:
    """What a bus has published: names in ``names``, events in ``events``. Mount points inside an iteration are left out."""

    def __init__(self, bus: Bus, *, inside: bool = False) -> None:
        self.events: list[Event] = []
        self._left_out = set() if inside else INSIDE_AN_ITERATION
        bus.on(Event, self._hear, priority=0)

    def _hear(self, event: Event) -> None:
        if event.mount_point not in self._left_out:
            self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.mount_point for event in self.events]

    def of(self, name: str) -> list[Any]:
        return [event for event in self.events if event.mount_point == name]


def spell(text: str) -> list[str]:
    """Expand a trace: ``"before_run 2*(before_train_iter after_train_iter)"``."""
    repeated = re.compile(r"(\d+)\*\(([^()]*)\)")
    while found := repeated.search(text):
        text = text[: found.start()] + f" {found[2]} " * int(found[1]) + text[found.end() :]
    return text.split()


def model(seed: int = 0, *, dropout: float = 0.0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 3)
    )


def batches(count: int, size: int = 4, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=generator), torch.arange(size) % 3) for _ in range(count)]


def step(model: Any, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def act_at(bus: Bus, mount_point: str, count: int, act: Callable[[Any], object], *, priority: int = 95) -> None:
    """Call ``act(event)`` at the ``count``-th event of a mount point (from 1) that is heard."""
    heard = itertools.count(1)
    bus.on(mount_point, lambda event: act(event) if next(heard) == count else None, priority=priority)


def learn(run: Run, batch: Batch) -> None:
    """Take a step as a loop of the user's own does."""
    loss = step(run.model, batch)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in run.optimizers.values():
        optimizer.step()
    run.report(loss=loss)


def evaluate(run: Run, evaluation: Any) -> dict[str, Any]:
    """Validate or test as a loop of the user's own does; return the metrics."""
    for batch in evaluation:
        run.report(loss=step(run.model, batch))
    return evaluation.metrics


def train(run: Run, data: Any, *, epochs: int = 1) -> None:
    """Train as a loop of the user's own does."""
    for _ in run.epochs(epochs):
        for batch in run.train(data):
            learn(run, batch)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: Any, other: Any) -> None:
    """Bitwise equality of two trees of tensors, arrays and plain values."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def loop(bus: Bus | None = None, **options: Any) -> TrainLoop:
    """A loop over 3 training and 2 validation batches, for 2 epochs, unless told otherwise."""
    if "max_iters" not in options:
        options.setdefault("max_epochs", 2)
    trained = options.pop("model", None) or model()
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    defaults = {"step": step, "train_data": batches(3), "val_data": batches(2, seed=2)}
    return TrainLoop(trained, bus=bus, **{**defaults, **options})


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of SIGINT, which a process that was started in the background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def parts() -> ModuleType:
    """The helpers above."""
    return sys.modules[__name__]


@pytest.fixture
def trace(bus: Bus) -> Trace:
    return Trace(bus)


@pytest.fixture(autouse=True)
def workers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End persistent workers with their test.

    Left to the garbage collector, each pass waits for five seconds: it finalizes the queues first that would tell them to end.
    """
    kind = dataloader._MultiProcessingDataLoaderIter
    passes: weakref.WeakSet[Any] = weakref.WeakSet()
    begin = kind.__init__

    def noted(one: Any, *arguments: Any) -> None:
        passes.add(one)
        begin(one, *arguments)

    monkeypatch.setattr(kind, "__init__", noted)
    yield
    for one in list(passes):
        one._shutdown_workers()


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """No test leaves gradients switched off, and none depends on the random state of another."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled()
