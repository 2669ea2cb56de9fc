"""A training small enough for examples: random numbers in four classes, and a network that tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def toy_job() -> tuple[
    nn.Sequential,
    torch.optim.Optimizer,
    Callable[[nn.Module, Batch], dict[str, torch.Tensor]],
    DataLoader[Any],
    DataLoader[Any],
]:
    """Return model, optimizer, step, training data and validation data of a job that takes milliseconds an epoch.

    The data are 384 and 128 rows of 16 floats, in batches of 32. The class of a row is the index of the largest of its first
    four numbers. All of it, and the weights, are the same each time; torch's random state is set to 0.
    """
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs[:, :4].argmax(1)
    train = DataLoader(TensorDataset(inputs[:384], targets[:384]), batch_size=32, shuffle=True)
    val = DataLoader(TensorDataset(inputs[384:], targets[384:]), batch_size=32)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), step, train, val


def step(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the loss, the accuracy and the logits (batch × 4) of a batch."""
    inputs, targets = batch
    logits = model(inputs)
    accuracy = (logits.argmax(1) == targets).float().mean()
    return {"loss": cross_entropy(logits, targets), "accuracy": accuracy, "logits": logits}
