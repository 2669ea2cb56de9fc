"""A tiny training job for the tests of hooks, under the fixture ``job``, and a store in memory, under ``memory``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainbus.eventloop import Bus, Hook, Run, TrainLoop

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(number: int = 4, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randint(0, 2, (4,), generator=generator)) for _ in range(number)]


def small_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def make_loop(*hooks: Hook, work_dir: Path | None = None, **options: Any) -> TrainLoop:
    """Return a loop over four batches; ``model`` and ``optimizer`` may be given."""
    model = options.pop("model", None) or small_model()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bus = options.pop("bus", None) or Bus()
    bus.add(*hooks)
    if "max_iters" not in options:
        options.setdefault("max_epochs", 2)
    options.setdefault("train_data", batches())
    options.setdefault("step", loss_of)
    return TrainLoop(model, optimizer, bus=bus, work_dir=work_dir, **options)


def own_loop(bus: Bus, model: nn.Module, optimizer: Any = None, *, train: int = 4, val: int = 0, **options: Any) -> Run:
    """Train an epoch of so many batches in a loop of one's own, validate, and return the run."""
    with Run(bus, model=model, optimizer=optimizer, **options) as run:
        for _ in run.epochs(1):
            for batch in run.train(batches(train)):
                if optimizer is not None:
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
            for batch in run.validate(batches(val)) if val else ():
                run.report(loss=loss_of(model, batch))
    return run


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class StopAfter(Hook):
    """Stops the run after so many iterations, in order."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def after_train_iter(self, event: Any) -> None:
        if event.progress.iter + 1 == self.iterations:
            event.run.stop()


class Scores:
    """A metric that returns one score after another."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = list(scores)

    def update(self) -> None: ...

    def compute(self) -> float | None:
        return self.scores.pop(0)

    def reset(self) -> None: ...


def scored(directory: Path, hook: Hook, *scores: float | None, **options: Any) -> TrainLoop:
    """Return a loop of as many epochs as there are scores, one ``acc`` after each."""
    options = {"max_epochs": len(scores), "val_data": batches(1), "metrics": {"acc": Scores(*scores)}} | options
    return make_loop(hook, work_dir=directory, **options)


def files(directory: Path) -> set[str]:
    """Return the names of the checkpoints in a directory."""
    return {path.name.removesuffix(".safetensors") for path in directory.glob("*.safetensors")}


@pytest.fixture
def there(memory):
    """Returns the names of the files that a run named ``run`` has in ``memory://bucket``, but for the record of scores."""

    def files():
        return (name.removeprefix("/bucket/run/") for name in memory.store)

    return lambda: {name.removesuffix(".safetensors") for name in files() if name != "scores.json"}


@pytest.fixture
def job() -> SimpleNamespace:
    classes = {"Scores": Scores, "StopAfter": StopAfter}
    return SimpleNamespace(
        **classes, batches=batches, loop=make_loop, loss=loss_of, model=small_model, same=same, weights=weights
    )
