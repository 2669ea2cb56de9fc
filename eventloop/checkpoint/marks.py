"""Tensors that are spread over processes, and what stands in a tree for one (see ``shards``)."""

from __future__ import annotations

import sys
from typing import Any

import torch

from trainbus.eventloop.checkpoint.forms import contiguous_strides, kind_of, strides_like
from trainbus.eventloop.checkpoint.shards import MARK


def is_dtensor(value: object) -> bool:
    """Return True for a tensor that is spread over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without that import there is none
    return tensors is not None and isinstance(value, tensors.DTensor)


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True if parameters of ``model`` are spread over processes."""
    return any(map(is_dtensor, model.parameters()))


def mark(name: str, tensor: torch.Tensor, part: torch.Tensor | None = None) -> dict[str, Any]:
    """Return what stands in the tree for a sharded tensor.

    Of its form (see ``forms``) this is the kind, and the strides that the whole has with its dimensions in the order in memory
    of ``part``; without ``part`` that order is unknown.
    """
    made: dict[str, Any] = {MARK: name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if part is not None and part.dim() > 1:
        plain = contiguous_strides(part.shape) == part.stride()
        made["strides"] = list(contiguous_strides(tensor.shape) if plain else strides_like(tensor.shape, part.stride()))
    if kind := kind_of(tensor):
        made["kind"] = kind
    return made
