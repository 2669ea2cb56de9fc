"""Small models with their batches, and the search for one that an optimizer can train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .kit import BATCHES, Make, Parts

MakeOptimizer = Callable[[nn.Module], Any]


def rows(*shape: int, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of an epoch, the same at each call."""
    generator = torch.Generator().manual_seed(2)
    size = 4
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(classes, (size,), generator=generator))
        for _ in range(BATCHES)
    ]


def classified(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


class Sparse(nn.Module):
    """Whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x[:, :2].abs().mul(3).long().clamp(max=9)).sum(1)


class Home(NamedTuple):
    """A model that optimizers of one kind train."""

    name: str
    model: Callable[[], nn.Module]
    closure: bool


HOMES = [
    Home(f"{model.__name__.lower()}{' with a closure' if closure else ''}", model, closure)
    for model in (dense, matrices, Sparse)
    for closure in (False, True)
]


def job(home: Home, optimizer: MakeOptimizer) -> Make:
    """Return the job of training the model of a home."""

    def make() -> Parts:
        model = home.model()
        return Parts(model, optimizer(model), classified, rows(6), closure=home.closure)

    return make


def home_of(optimizer: MakeOptimizer, homes: Iterable[Home] = HOMES) -> tuple[Home | None, str]:
    """Return the first home in which an optimizer changes the weights and leaves them finite; else why it does in none."""
    reason = ""
    for home in homes:
        try:
            torch.manual_seed(0)
            parts = job(home, optimizer)()
            before = [each.detach().clone() for each in parts.model.parameters()]
            for batch in parts.data * 2:
                parts.update(batch)
        except Exception as error:  # noqa: BLE001 - the next home may do
            reason = reason or f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
            continue
        after = list(parts.model.parameters())
        if any(map(torch.ne, [one.sum() for one in before], [one.sum() for one in after])) and all(
            one.isfinite().all() for one in after
        ):
            return home, ""
        reason = reason or "its steps change no weight, or make them infinite"
    return None, reason
