"""Copies of trees of values: the states of ``stateful`` objects and of kept values."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection
from types import NoneType
from typing import Any, Final

import numpy as np
import torch

LARGE: Final = 2**24
"""Bytes of tensors and arrays that each epoch copies: 16 MiB take some milliseconds."""
_MOST_NUMBERS: Final = 120_000
"""Numbers and texts in lists that each epoch copies: they take some milliseconds."""
_OTHER: Final = 120
"""A tensor, or a number beside other values, takes as long as so many numbers in a list of numbers."""
_PLAIN: Final = frozenset(
    (
        *(NoneType, bool, int, float, complex, str, bytes),
        *(np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]),
    )
)


def is_flat(values: Collection[Any]) -> bool:
    """Return True if all values are plain numbers and texts, which no one can change."""
    return _PLAIN.issuperset(map(type, values))


def copied(value: Any, most: float = LARGE) -> Any:
    """Copy containers, and tensors and arrays of at most ``most`` bytes; larger ones stay the same objects."""
    if isinstance(value, torch.Tensor):
        try:
            return _copied_tensor(value) if size_of(value) <= most else value
        except (RuntimeError, NotImplementedError):  # some layouts of quantized tensors cannot be copied (pytorch#74540)
            return value
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= most else value
    if isinstance(value, dict):
        new = copy.copy(value)
        if not is_flat(value.values()):
            new.update({key: copied(one, most) for key, one in value.items()})
        return new
    if isinstance(value, tuple):
        if is_flat(value):
            return value
        parts = [copied(one, most) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts) if type(value) is tuple else value
    if isinstance(value, list | deque):
        items: list[Any] | deque[Any] = copy.copy(value)
        if not is_flat(value):
            items.clear()
            items.extend(copied(one, most) for one in value)
        return items
    return copy.copy(value) if isinstance(value, set | bytearray) else value


def _copied_tensor(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor where it is; a large one into the memory of the CPU, which has room for it."""
    value = value.detach()
    return value.clone() if size_of(value) <= LARGE or value.device.type == "cpu" else value.cpu()


def is_large(tree: Any) -> bool:
    """Return True if a copy of a tree takes more than some milliseconds. The answer does not take longer."""
    if type(tree) in _PLAIN:
        return False
    work, size, rest = 0, 0, [tree]
    while rest and work <= _MOST_NUMBERS and size <= LARGE:
        one = rest.pop()
        work += _OTHER
        if isinstance(one, torch.Tensor | np.ndarray):
            size += size_of(one)
        elif isinstance(one, dict | list | tuple | deque | set):
            inner = one.values() if isinstance(one, dict) else one
            work += len(inner)
            if work <= _MOST_NUMBERS and not is_flat(inner):
                rest += inner
    return work > _MOST_NUMBERS or size > LARGE


def size_of(tree: Any) -> int:
    """Return the bytes of the tensors and arrays in a tree; a sparse one counts as if it were dense."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()  # sparse tensors have no nbytes
    if isinstance(tree, np.ndarray):
        return tree.nbytes
    if not isinstance(tree, dict | list | tuple | deque):
        return 0
    inner = tree.values() if isinstance(tree, dict) else tree
    return 0 if is_flat(inner) else sum(map(size_of, inner))
