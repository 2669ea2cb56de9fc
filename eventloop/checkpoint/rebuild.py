"""The way back from a packed tree (see `tree`)."""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import torch

from eventloop.checkpoint.tree import (
    ARRAY,
    COMPLEX,
    COUNTER,
    DEFAULT,
    DEVICE,
    DICT,
    DTYPE,
    FACTORIES,
    FROZENSET,
    INT,
    MAX_DEPTH,
    ORDERED,
    SCALAR,
    SET,
    SIZE,
    STR,
    TENSOR,
    TUPLE,
    short,
    text_of,
)

_BRANCHES: Final = frozenset({list, dict, tuple, set, frozenset, OrderedDict, Counter, defaultdict})
_NUMERIC_DTYPE: Final = re.compile(r"[<>|][biufc]\d{1,2}", re.ASCII)
# Not getattr(torch, name): torch imports whole packages when it is asked for their names.
DTYPES: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def unflatten(packed: msgspec.Raw, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild the tree from its packed rest and its tensors in the order they were met."""
    tree = _Decoder(tensors).decode(packed)
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [part for each in level if type(each) in _BRANCHES for part in _parts(each) if type(part) in _BRANCHES]
        if not level:
            return tree
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _parts(container: Any) -> Iterable[object]:
    if type(container) is OrderedDict:
        return chain(container, container.values(), vars(container).values())
    return chain(container, container.values()) if isinstance(container, dict) else container


class _Decoder:
    """The way back. It trusts its input no further than the digest does: what is malformed raises a builtin error."""

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        self._tensors = tensors
        self.decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode

    def _extension(self, code: int, payload: memoryview) -> object:
        if code == TENSOR:
            return self._tensor()
        decode = _DECODE.get(code)
        if decode is not None:
            return decode(bytes(payload))
        decode_container = _DECODE_CONTAINER.get(code)
        if decode_container is None:
            raise ValueError(f"unknown extension type {code}")
        return decode_container(self.decode(payload))

    def _tensor(self) -> torch.Tensor:
        for tensor in self._tensors:
            return tensor
        raise ValueError("more tensors in the tree than in its list")


def _decode_ordered(parts: list[Any]) -> object:
    mapping, attributes = parts
    ordered = OrderedDict(mapping)
    set_attributes(ordered, attributes)
    return ordered


def set_attributes(ordered: OrderedDict[Any, Any], attributes: Mapping[Any, Any]) -> None:
    """Give an OrderedDict attributes of its own, none of which hides a method: ``items`` is called by whatever reads it.

    Raises:
        ValueError: one does.
    """
    for name in attributes:
        if not isinstance(name, str) or hasattr(OrderedDict, name):
            raise ValueError(f"an attribute {short(text_of(name))} of an OrderedDict")
    vars(ordered).update(attributes)


def _decode_default(parts: list[Any]) -> object:
    name, mapping = parts
    return defaultdict(None if name is None else FACTORIES[name], mapping)


def _decode_array(parts: list[Any]) -> Any:
    text, shape, data = parts
    # np.dtype() understands a small language, parts of which are evaluated by Python's own parser.
    if not _NUMERIC_DTYPE.fullmatch(text):
        raise ValueError(f"an array of dtype {text}")
    return np.ndarray(shape, np.dtype(text), bytearray(data))


def _decode_dict(parts: list[Any]) -> object:
    keys, values = parts
    return dict(zip(keys, values, strict=True))


_DECODE: Final[dict[int, Callable[[bytes], object]]] = {
    INT: lambda payload: int.from_bytes(payload, "little", signed=True),
    STR: lambda payload: payload.decode("utf-8", "surrogatepass"),
    COMPLEX: lambda payload: complex(*struct.unpack("<dd", payload)),
    DTYPE: lambda payload: DTYPES[f"torch.{payload.decode()}"],
    DEVICE: lambda payload: torch.device(payload.decode()),
}
_DECODE_CONTAINER: Final[dict[int, Callable[[Any], object]]] = {
    TUPLE: tuple,
    SIZE: torch.Size,
    SET: set,
    FROZENSET: frozenset,
    DICT: _decode_dict,
    ORDERED: _decode_ordered,
    COUNTER: Counter,
    DEFAULT: _decode_default,
    ARRAY: _decode_array,
    SCALAR: lambda parts: _decode_array([parts[0], (), parts[1]])[()],
}
UNPACKED: Final = frozenset(_DECODE_CONTAINER)
"""Extensions whose payload is unpacked again."""
