"""Forms of tensors: what a loaded tensor has beside its numbers, as ``torch.load`` would give it.

The files hold the elements of each tensor in the order of its dimensions, as every reader of safetensors expects. Other
strides (``channels_last``, transposed), ``requires_grad`` and ``Parameter`` are in the tree.

The rule for strides is that of ``torch.empty_like``: a tensor whose elements fill its memory, in whatever order, keeps its
strides. One with gaps, or with elements that share memory (``expand``), comes back dense, its dimensions in the same order in
memory; ``torch.save`` would write the memory of the gaps too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

import torch

from trainbus.eventloop.checkpoint.dtypes import FOREIGN_NAMES, SAFE_NAMES
from trainbus.eventloop.errors import CheckpointValueError

GRAD: Final = 1
"""Set in the kind of a tensor that requires a gradient;"""
PARAMETER: Final = 2
"""of a ``Parameter``."""

needs_grad: Final = attrgetter("requires_grad")


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of elements in the order of the dimensions, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_to_keep(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides that a loaded tensor gets; None if they follow from its shape, or if nothing can depend on them."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.stride() == (plain := contiguous_strides(tensor.shape)):
        return None
    strides = torch.empty_like(tensor, device="meta").stride()
    return None if strides == plain else strides


def strides_like(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps for a shape, its dimensions in the order in memory of others that have these strides."""
    return torch.empty_like(torch.empty_strided(tuple(shape), tuple(strides), device="meta")).stride()


def is_exact(tensor: torch.Tensor) -> bool:
    """Return True if its strides are to be compared one by one: ``is_contiguous`` does not tell, or would say no."""
    return tensor.dim() > 1 and (tensor.stride() != contiguous_strides(tensor.shape) or not min(tensor.shape) > 1)


def with_strides(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return a contiguous tensor as it is, or a copy of it with these strides.

    Raises:
        ValueError: they leave gaps, or let elements share memory.
    """
    if strides is None:
        return tensor
    if len(strides) != tensor.dim():
        raise ValueError(f"{len(strides)} strides for {tensor.dim()} dimensions")
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, tensor.shape, strict=True) if size != 1):
        if stride != step:
            raise ValueError(f"strides {tuple(strides)} for the shape {tuple(tensor.shape)}")
        step *= size
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return made.copy_(tensor)


def kind_of(tensor: torch.Tensor) -> int:
    """Return what ``in_tree`` makes of a plain tensor to have one as this is."""
    return tensor.requires_grad * GRAD | (type(tensor) is torch.nn.Parameter) * PARAMETER


def in_tree(slots: Sequence[int], kinds: Mapping[int, int], tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree: for each the one at its slot, of its kind. Of one slot and kind there is one object."""
    made: dict[tuple[int, int], torch.Tensor] = {}
    for index, slot in enumerate(slots):
        kind = kinds.get(index, 0)
        if kind and (slot, kind) not in made:
            made[slot, kind] = with_kind(tensors[slot], kind)
        yield made[slot, kind] if kind else tensors[slot]


def with_kind(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """Return a tensor of this kind with the memory of a plain one."""
    if not kind:
        return tensor
    if kind & PARAMETER:
        return torch.nn.Parameter(tensor, bool(kind & GRAD))
    return tensor.detach().requires_grad_()


def reinterpreted(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of another dtype and shape that has the memory of one, without being a view of it."""
    if not tensor.numel():
        return torch.empty(shape, dtype=dtype)  # torch refuses some shapes, whose strides are not to be counted
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, tuple(shape), contiguous_strides(shape))


def check_storable(tensors: Sequence[torch.Tensor], path: Callable[[int], str]) -> None:
    """Raise CheckpointValueError for a tensor that no file can hold; ``path`` gives that of a tensor by its index."""
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_nested:
            problem, way_out = str(tensor.layout).removeprefix("torch."), "x.to_dense()"
            if tensor.is_nested:
                problem, way_out = "nested", "x.unbind()"
        elif tensor.is_quantized:
            problem, way_out = "quantised", "x.int_repr(), with its scale and zero point"
        elif tensor.is_meta:
            problem, way_out = "meta", "one with memory (module.to_empty(device=...))"
        elif tensor.dtype not in SAFE_NAMES and tensor.dtype not in FOREIGN_NAMES:
            problem, way_out = str(tensor.dtype).removeprefix("torch."), "x.view(torch.uint8)"
        else:
            continue
        raise CheckpointValueError(f"{path(index) or 'the tree'}: cannot store a {problem} tensor; store {way_out}")
