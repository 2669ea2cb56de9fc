"""Rebuild a tree from its packed bytes (see ``tree``), or with other values in its containers."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from trainbus.eventloop.checkpoint import container
from trainbus.eventloop.checkpoint.forms import with_kind, with_strides
from trainbus.eventloop.checkpoint.objects import ObjectParts, Rebuild, put_together
from trainbus.eventloop.checkpoint.tree import FACTORIES, MAX_DEPTH, MAX_VALUES, Code, join, short, text_of
from trainbus.eventloop.errors import CheckpointValueError

_BRANCHES: Final = frozenset(
    {list, dict, tuple, set, frozenset, OrderedDict, Counter, defaultdict, torch.Size, deque, ObjectParts}
)
_NUMERIC_DTYPE: Final = re.compile(r"[<>|=][biufc]\d{1,2}", re.ASCII)
# Not getattr(torch, name): torch imports whole packages when it is asked for their names.
DTYPES: Final = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

_TOKENS: Final = 8 * MAX_VALUES
"""A value takes up to so many: a numpy array is an extension around a list of three, the second of which is a list."""
_SMALL: Final = 4 << 20
"""Bytes that are not worth counting: 100,000 tensors have as many, and they become 400 MB at most."""


def unflatten(packed: msgspec.Raw, tensors: Iterator[torch.Tensor], make: Rebuild = put_together) -> Any:
    """Rebuild the tree from its packed rest and its tensors in the order they were met; ``make`` its ``objects``.

    It trusts its input no further than the digest does: malformed input raises a builtin error.
    """

    def extension(code: int, payload: memoryview) -> object:
        if code == Code.TENSOR:
            for tensor in tensors:
                return tensor
            raise ValueError("more tensors in the tree than in its list")
        if (decode_value := _DECODE.get(code)) is not None:
            return decode_value(bytes(payload))
        if (decode_container := _DECODE_CONTAINER.get(code)) is not None:
            return decode_container(decode(payload))  # noqa: F821 - deleted after the last call
        if code == Code.OBJECT:
            name, content = decode(payload)  # noqa: F821 - likewise
            if type(name) is not str or type(content) is not dict:
                raise ValueError(f"an object of type {short(text_of(name))} without the names of its parts")
            return make(name, content)
        raise ValueError(f"unknown extension type {code}")

    decode = msgspec.msgpack.Decoder(ext_hook=extension).decode
    try:
        tree = decode(packed)
    finally:
        del decode  # it and ``extension`` hold each other, and all tensors
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [part for each in level if _is_branch(each) for part in _parts(each) if _is_branch(part)]
        if not level:
            return tree
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _is_branch(value: object) -> bool:
    return type(value) in _BRANCHES or isinstance(value, tuple)  # also named ones


def _parts(container: Any) -> Iterable[object]:
    if type(container) is ObjectParts:
        return container.content.values()
    if not isinstance(container, dict):
        return container  # type: ignore[no-any-return]
    return chain(container, container.values(), vars(container).values() if type(container) is OrderedDict else ())


def _ordered(mapping: Mapping[Any, Any], attributes: Mapping[Any, Any]) -> OrderedDict[Any, Any]:
    """Return an OrderedDict with its attributes. None of them may hide a method such as ``items``, which readers call."""
    for name in attributes:
        if not isinstance(name, str) or hasattr(OrderedDict, name):
            raise ValueError(f"an attribute {short(text_of(name))} of an OrderedDict")
    ordered = OrderedDict(mapping)
    vars(ordered).update(attributes)
    return ordered


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
        return _ordered(copied, convert_parts(vars(container), join(path, "(attributes)"), convert))
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
    known = container.DTYPES[dtype]
    if container.elements(shape, len(data)) * known.itemsize != len(data):
        raise ValueError(f"a tensor of {known} of {len(shape)} dimensions in {len(data):,} bytes")
    plain = torch.empty(shape, dtype=known)
    if data:
        plain.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return with_kind(with_strides(plain, strides), kind)


_DECODE: Final[dict[int, Callable[[bytes], object]]] = {
    Code.INT: lambda payload: int.from_bytes(payload, "little", signed=True),
    Code.STR: lambda payload: payload.decode("utf-8", "surrogatepass"),
    Code.COMPLEX: lambda payload: complex(*struct.unpack("<dd", payload)),
    Code.DTYPE: lambda payload: DTYPES[payload.decode()],
    Code.DEVICE: lambda payload: torch.device(payload.decode()),
}
_DECODE_CONTAINER: Final[dict[int, Callable[[Any], object]]] = {
    Code.TUPLE: tuple,
    Code.SIZE: torch.Size,
    Code.SET: set,
    Code.FROZENSET: frozenset,
    Code.DICT: lambda parts: dict(zip(*parts, strict=True)),
    Code.ORDERED: lambda parts: _ordered(*parts),
    Code.COUNTER: Counter,
    Code.DEFAULT: lambda parts: defaultdict(None if parts[0] is None else FACTORIES[parts[0]], parts[1]),
    Code.INLINE: lambda parts: _tensor(*parts),
    Code.ARRAY: lambda parts: number_array(*parts),
    Code.SCALAR: lambda parts: number_array(parts[0], (), parts[1])[()],
}

_UNPACKED: Final = _DECODE_CONTAINER.keys() | {Code.OBJECT}

# MessagePack, by the first byte of a token: its length in bytes, without a payload (for a map or list, the length of its
# header only);
_STEPS: Final = bytes(
    (
        *(1,) * 0xA0,  # small integers, maps, lists
        *range(1, 33),  # short texts
        *(1, 1, 1, 1),  # nil, booleans
        *(2, 3, 5, 3, 4, 6),  # bytes, extensions
        *(5, 9, 2, 3, 5, 9, 2, 3, 5, 9),  # numbers
        *(2, 2, 2, 2, 2, 2, 3, 5, 3, 5, 3, 5),  # extensions of a fixed length, texts, lists, maps
        *(1,) * 32,  # small integers
    )
)
# and the bytes that tell the length of the payload.
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}
_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, **_EXTENSIONS}


def check_packed(packed: memoryview) -> None:
    """Raise ValueError for a tree of more values than can be saved, before a byte of it becomes an object of many."""
    if len(packed) <= _SMALL:
        return
    at = tokens = 0
    while at < len(packed):
        tokens += 1
        if tokens > _TOKENS:
            raise ValueError(f"more than {_TOKENS:,} values")
        start, code = at + 1, packed[at]
        at += _STEPS[code]
        if code in _LENGTHS and not (code in _EXTENSIONS and packed[at - 1] in _UNPACKED):  # those are unpacked as well
            length = _LENGTHS[code]
            at += int.from_bytes(packed[start : start + length], "big") if length else 1 << (code - 0xD4)
