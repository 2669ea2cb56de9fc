"""Which of a trainer's tensors are the model's."""

from __future__ import annotations

from typing import Any

import torch


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
