"""What the trainers train: a model that notes when its forward passes begin, on the same row again and again."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]


class Rows(NamedTuple):
    """Of a batch: how many, and how long each is."""

    number: int
    width: int


@dataclass
class Job:
    """A trainer calls ``model(**batch)["loss"]``, ``backward()`` and the optimizer's step, so many times."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    rows: Rows
    directory: Path

    def loader(self) -> DataLoader[Batch]:
        return DataLoader(self.data, self.rows.number)

    @property
    def data(self) -> Dataset[Batch]:
        return Same(self.steps * self.rows.number, self.rows.width)

    @property
    def batch(self) -> Batch:
        return {"x": torch.ones(self.rows)}


class Same(Dataset[Batch]):
    """One row, again and again."""

    def __init__(self, length: int, width: int) -> None:
        self.length = length
        self.row = {"x": torch.ones(width)}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return self.row
