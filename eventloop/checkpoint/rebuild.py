"""Rebuild a tree from its packed bytes (see ``tree``), or with other values in its containers."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from trainbus.eventloop.checkpoint import dtypes
from trainbus.eventloop.checkpoint.container import elements
from trainbus.eventloop.checkpoint.forms import with_kind, with_strides
from trainbus.eventloop.checkpoint.objects import put_together
from trainbus.eventloop.checkpoint.unpack import CONTAINERS, VALUES, Code, Rebuild, join, ordered, text_of, unpack
from trainbus.eventloop.errors import CheckpointValueError

_NUMERIC_DTYPE: Final = re.compile(r"[<>|=][biufc]\d{1,2}", re.ASCII)
# Not getattr(torch, name): torch imports whole packages when it is asked for their names.
DTYPES: Final = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def unflatten(packed: msgspec.Raw, tensors: Iterator[torch.Tensor], make: Rebuild = put_together) -> Any:
    """Rebuild the tree from its packed rest and its tensors in the order they were met; ``make`` its ``objects``.

    Malformed input raises a builtin error.
    """

    def tensor() -> torch.Tensor:
        for one in tensors:
            return one
        raise ValueError("more tensors in the tree than in its list")

    return unpack(packed, _VALUES, _CONTAINERS, tensor, make)


def convert_parts(container: Any, path: str, convert: Callable[[Any, str], Any]) -> Any:
    """Copy a container with ``convert(part, its path)`` for each part; a defaultdict becomes a dict, a frozenset a set."""

    def hashable(part: Any, where: str) -> Any:
        converted = convert(part, where)
        try:
            hash(converted)
        except TypeError as error:
            what = f"{where}: torch.load(weights_only=True) refuses {text_of(part)} as a key or in a set"
            raise CheckpointValueError(what) from error
        return converted

    kind = type(container)
    if kind in (list, tuple):
        return kind(convert(part, join(path, index)) for index, part in enumerate(container))
    if kind in (set, frozenset):
        return {hashable(part, join(path, "(item)")) for part in container}
    copied: Any = Counter() if kind is Counter else {}
    for key, part in container.items():
        copied[hashable(key, join(path, "(key)"))] = convert(part, join(path, key))
    if kind is OrderedDict:  # nn.Module.state_dict() keeps versions of modules in an attribute
        return ordered(copied, convert_parts(vars(container), join(path, "(attributes)"), convert))
    return copied


def number_array(dtype: str, shape: tuple[int, ...], data: bytes, order: Literal["C", "F"] = "C") -> Any:
    """Return an array of numbers; ValueError for another ``dtype``, or as many bytes as it does not have."""
    # np.dtype() understands a small language, parts of which are evaluated by Python's own parser.
    if not _NUMERIC_DTYPE.fullmatch(dtype):
        raise ValueError(f"an array of dtype {dtype}; only numbers can be read")
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"an array of {dtype} of shape {shape} in {len(data):,} bytes")
    return np.ndarray(shape, np.dtype(dtype), bytearray(data), order=order)


def _tensor(dtype: str, shape: list[int], data: bytes, strides: list[int] | None = None, kind: int = 0) -> torch.Tensor:
    known = dtypes.DTYPES[dtype]
    if elements(shape, len(data)) * known.itemsize != len(data):
        raise ValueError(f"a tensor of {known} of {len(shape)} dimensions in {len(data):,} bytes")
    plain = torch.empty(shape, dtype=known)
    if data:
        plain.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return with_kind(with_strides(plain, strides), kind)


_VALUES: Final[dict[int, Callable[[bytes], object]]] = {
    **VALUES,
    Code.DTYPE: lambda payload: DTYPES[payload.decode()],
    Code.DEVICE: lambda payload: torch.device(payload.decode()),
}
_CONTAINERS: Final[dict[int, Callable[[Any], object]]] = {
    **CONTAINERS,
    Code.SIZE: torch.Size,
    Code.INLINE: lambda parts: _tensor(*parts),
    Code.ARRAY: lambda parts: number_array(*parts),
    Code.SCALAR: lambda parts: number_array(parts[0], (), parts[1])[()],
}
