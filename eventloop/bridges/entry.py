"""The state of a bus in another trainer's checkpoint: its schema, and which of the trainer's tensors are the model's."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from eventloop.errors import CheckpointError
from eventloop.training.saves.capture import FORMAT
from eventloop.training.state import Count, Counters


class _Entry(msgspec.Struct):
    """The types that a resume requires: the trainer's file may hold any others."""

    format: int
    progress: Counters
    bus: _BusEntry
    info: dict[str, Any] = {}


class _BusEntry(msgspec.Struct):
    hooks: dict[str, Any]
    publishes: dict[str, Count]


def check_entry(entry: object) -> None:
    """Raise CheckpointError if the value is not the state of a bus, or its format is too new."""
    try:
        known = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"the checkpoint does not hold the state of a bus: {error}; remove it from the checkpoint to resume without it"
        ) from error
    if known.format > FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {known.format}, but this trainbus reads up to {FORMAT}; upgrade trainbus"
        )


def same_tensor(one: object, other: object) -> bool:
    """Return True if two values are tensors in one place in memory."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    here, there = _part(one), _part(other)
    return here.device == there.device and here.data_ptr() == there.data_ptr() and here.shape == there.shape


def _part(tensor: Any) -> torch.Tensor:
    """Return the part of a sharded tensor that is in this process; any other tensor itself."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
