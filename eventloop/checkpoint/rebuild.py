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

from eventloop.checkpoint.tree import FACTORIES, MAX_DEPTH, MAX_VALUES, Code, short, text_of

_TENSOR: Final = Code.TENSOR
_BRANCHES: Final = frozenset({list, dict, tuple, set, frozenset, OrderedDict, Counter, defaultdict})
_NUMERIC_DTYPE: Final = re.compile(r"[<>|][biufc]\d{1,2}", re.ASCII)
# Not getattr(torch, name): torch imports whole packages when it is asked for their names.
DTYPES: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

_TOKENS: Final = 8 * MAX_VALUES
"""A value takes up to so many: a numpy array is an extension around a list of three, the second of which is a list."""
_SMALL: Final = 4 << 20
"""Bytes that are not worth counting: 100,000 tensors have as many, and they become 400 MB at most."""


def unflatten(packed: msgspec.Raw, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild the tree from its packed rest and its tensors in the order they were met.

    It trusts its input no further than the digest does: malformed input raises a builtin error.
    """
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
    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        self._tensors = tensors
        self.decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode

    def _extension(self, code: int, payload: memoryview) -> object:
        if code == _TENSOR:
            for tensor in self._tensors:
                return tensor
            raise ValueError("more tensors in the tree than in its list")
        if (decode := _DECODE.get(code)) is not None:
            return decode(bytes(payload))
        if (decode_container := _DECODE_CONTAINER.get(code)) is not None:
            return decode_container(self.decode(payload))
        raise ValueError(f"unknown extension type {code}")


def _decode_ordered(parts: list[Any]) -> object:
    mapping, attributes = parts
    ordered = OrderedDict(mapping)
    set_attributes(ordered, attributes)
    return ordered


def set_attributes(ordered: OrderedDict[Any, Any], attributes: Mapping[Any, Any]) -> None:
    """Give an OrderedDict attributes of its own. None may hide a method such as ``items``, which readers call."""
    for name in attributes:
        if not isinstance(name, str) or hasattr(OrderedDict, name):
            raise ValueError(f"an attribute {short(text_of(name))} of an OrderedDict")
    vars(ordered).update(attributes)


def _decode_array(parts: list[Any]) -> Any:
    text, shape, data = parts
    # np.dtype() understands a small language, parts of which are evaluated by Python's own parser.
    if not _NUMERIC_DTYPE.fullmatch(text):
        raise ValueError(f"an array of dtype {text}")
    return np.ndarray(shape, np.dtype(text), bytearray(data))


def _decode_dict(parts: list[Any]) -> object:
    keys, values = parts
    return dict(zip(keys, values, strict=True))


def _decode_default(parts: list[Any]) -> object:
    name, mapping = parts
    return defaultdict(None if name is None else FACTORIES[name], mapping)


_DECODE: Final[dict[int, Callable[[bytes], object]]] = {
    Code.INT: lambda payload: int.from_bytes(payload, "little", signed=True),
    Code.STR: lambda payload: payload.decode("utf-8", "surrogatepass"),
    Code.COMPLEX: lambda payload: complex(*struct.unpack("<dd", payload)),
    Code.DTYPE: lambda payload: DTYPES[f"torch.{payload.decode()}"],
    Code.DEVICE: lambda payload: torch.device(payload.decode()),
}
_DECODE_CONTAINER: Final[dict[int, Callable[[Any], object]]] = {
    Code.TUPLE: tuple,
    Code.SIZE: torch.Size,
    Code.SET: set,
    Code.FROZENSET: frozenset,
    Code.DICT: _decode_dict,
    Code.ORDERED: _decode_ordered,
    Code.COUNTER: Counter,
    Code.DEFAULT: _decode_default,
    Code.ARRAY: _decode_array,
    Code.SCALAR: lambda parts: _decode_array([parts[0], (), parts[1]])[()],
}

_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes and texts: the number of bytes of their length."""

_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}
"""The same of extensions; those of a fixed length have none."""


def _steps() -> list[int]:
    """Return for each first byte of a token the length of the token in bytes; 0 where that depends on the following bytes."""
    steps = [1] * 256  # nil, booleans, small integers; and the beginnings of maps and lists, whose parts follow
    for code in range(0xA0, 0xC0):
        steps[code] = 1 + (code & 31)  # short texts
    fixed = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    fixed |= {0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
    for code, step in {**fixed, **dict.fromkeys((*_LENGTHS, *_EXTENSIONS), 0)}.items():
        steps[code] = step
    return steps


_STEPS: Final = _steps()


def check_packed(packed: memoryview) -> None:
    """Raise ValueError for a tree of more values than can be saved, before a byte of it becomes an object of many."""
    if len(packed) <= _SMALL:
        return
    at, end, tokens = 0, len(packed), 0
    while at < end:
        tokens += 1
        if tokens > _TOKENS:
            raise ValueError(f"more than {_TOKENS:,} values")
        code = packed[at]
        step = _STEPS[code]
        if step:
            at += step
        elif code in _LENGTHS:
            start = at + 1 + _LENGTHS[code]
            at = start + int.from_bytes(packed[at + 1 : start], "big")
        else:
            at = _after(packed, at, code)


def _after(packed: memoryview, at: int, code: int) -> int:
    """Return where the next token after the beginning of an extension starts: inside it, if its payload is unpacked as well."""
    start = at + 1 + _EXTENSIONS[code]
    length = int.from_bytes(packed[at + 1 : start], "big") if _EXTENSIONS[code] else 1 << (code - 0xD4)
    unpacked = start < len(packed) and packed[start] in _DECODE_CONTAINER
    return start + 1 + (0 if unpacked else length)
