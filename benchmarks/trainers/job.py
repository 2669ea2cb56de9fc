"""The job of all trainers: a model that records when its forward passes begin, on the same row again and again."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]


class Rows(NamedTuple):
    """The rows of a batch: their number and length."""

    number: int
    width: int


@dataclass
class Job:
    """The model and the steps. A trainer calls ``model(**batch)["loss"]``, ``backward()`` and the optimizer's step."""

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
    """A dataset of one row, repeated."""

    def __init__(self, length: int, width: int) -> None:
        self.length = length
        self.row = {"x": torch.ones(width)}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return self.row
