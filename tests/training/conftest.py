"""Small parts that the tests of training share: a model, data, a step, and a trace of what a bus publishes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import dataloader

from eventloop import Bus, Event, TrainLoop
from eventloop.checkpoint import load

Batch = tuple[torch.Tensor, torch.Tensor]

INSIDE_AN_ITERATION = {
    "before_forward",
    "after_forward",
    "before_backward",
    "after_backward",
    "before_optimizer_step",
    "after_optimizer_step",
}


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


def make_model(seed: int = 0, *, dropout: float = 0.0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 3)
    )


def make_batches(count: int, size: int = 4, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=generator), torch.arange(size) % 3) for _ in range(count)]


def step(model: Any, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


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


class Parts:
    """The helpers above, handed to tests as one fixture (test modules cannot import each other)."""

    Trace = Trace
    spell = staticmethod(spell)
    model = staticmethod(make_model)
    batches = staticmethod(make_batches)
    step = staticmethod(step)
    damage = staticmethod(damage)
    weights = staticmethod(weights)
    assert_same = staticmethod(assert_same)
    load: Callable[[Path], Any] = staticmethod(load)

    @staticmethod
    def loop(bus: Bus | None = None, **options: Any) -> TrainLoop:
        """A loop over 3 training and 2 validation batches, for 2 epochs, unless told otherwise."""
        if "max_iters" not in options:
            options.setdefault("max_epochs", 2)
        model = options.pop("model", None) or make_model()
        if "optimizer" not in options:
            options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options.setdefault("step", step)
        options.setdefault("train_data", make_batches(3))
        options.setdefault("val_data", make_batches(2, seed=2))
        return TrainLoop(model, bus=bus, **options)


@pytest.fixture(scope="session")
def parts() -> type[Parts]:
    return Parts


@pytest.fixture
def bus() -> Bus:
    return Bus()


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
