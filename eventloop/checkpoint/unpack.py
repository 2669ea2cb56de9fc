"""The packed bytes of a tree (see ``tree``): the types in them, and what takes them apart again, without torch."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, Final

import msgspec

from trainbus.eventloop.checkpoint.container import ForeignInfo, Strides

MAX_DEPTH: Final = 100
MAX_VALUES: Final = 20_000_000
"""In one tree, tensors and the bytes of arrays not counted; files that promise more are not read."""
_TOKENS: Final = 8 * MAX_VALUES
"""A value takes up to so many: a numpy array is an extension around a list of three, the second of which is a list."""
_SMALL: Final = 4 << 20
"""Bytes that are not worth counting: 100,000 tensors have as many, and they become 400 MB at most."""


class Code:
    """Types of extensions. The numbers are part of the file format: never reuse one, only add."""

    TENSOR, INT, STR, COMPLEX, TUPLE, SIZE, SET, FROZENSET, DICT, ORDERED = range(1, 11)
    COUNTER, DEFAULT, ARRAY, SCALAR, DTYPE, DEVICE, INLINE, OBJECT = range(11, 19)


class ObjectParts(msgspec.Struct, frozen=True, eq=False):  # equal to nothing else, so that it may be a key
    """A value that was not put together: where the data of tensors are not read, or its class is not imported."""

    type: str
    """Its name: ``"deque"``, or ``"package.module:Name"`` of a class that is not Python's or torch's."""
    content: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.type}({', '.join(f'{name}={value!r}' for name, value in self.content.items())})"


Rebuild = Callable[[str, dict[str, Any]], Any]
"""Makes a value of the name of its type and its content."""


FACTORIES: Final[dict[str, Callable[[], object]]] = {
    factory.__name__: factory for factory in (bool, bytes, dict, float, int, list, set, str, tuple)
}
_BRANCHES: Final = frozenset({list, dict, tuple, set, frozenset, OrderedDict, Counter, defaultdict, deque, ObjectParts})


class Body(msgspec.Struct, array_like=True):
    """What is in the file under ``__tree__``."""

    slots: list[Annotated[int, msgspec.Meta(ge=0)]]
    foreign: dict[int, ForeignInfo]
    tree: msgspec.Raw
    strides: dict[int, Strides] = {}
    """Of tensors in the file, by their place in the header."""
    kinds: dict[int, int] = {}
    """Of tensors in the tree, by their place in ``slots``."""


def body_of(packed: memoryview) -> Body:
    """Return the body of a checkpoint, whose tree is still packed."""
    check_packed(packed)
    return msgspec.msgpack.decode(packed, type=Body)


def unpack(
    packed: msgspec.Raw,
    values: Mapping[int, Callable[[bytes], object]],
    containers: Mapping[int, Callable[[Any], object]],
    tensor: Callable[[], object],
    make: Rebuild = ObjectParts,
) -> Any:
    """Rebuild a tree from its packed bytes, with a function for each type of extension.

    It trusts its input no further than the digest does: malformed input raises a builtin error.

    Args:
        packed: the tree.
        values: makes a value of the bytes of an extension, by the extension's code.
        containers: makes a value of what the extension has packed.
        tensor: returns the next tensor.
        make: makes a value of the name of its type and its content.
    """

    def extension(code: int, payload: memoryview) -> object:
        if code == Code.TENSOR:
            return tensor()
        if (decode_value := values.get(code)) is not None:
            return decode_value(bytes(payload))
        if (decode_container := containers.get(code)) is not None:
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


def plain(packed: msgspec.Raw) -> Any:
    """Rebuild a tree with its numbers, texts and containers; a tensor or an array in it is an empty :class:`ObjectParts`."""
    return unpack(packed, {**VALUES, **dict.fromkeys((Code.DTYPE, Code.DEVICE), bytes.decode)}, _PLAIN, lambda: _LEFT_OUT)


def ordered(mapping: Mapping[Any, Any], attributes: Mapping[Any, Any]) -> OrderedDict[Any, Any]:
    """Return an OrderedDict with its attributes. None of them may hide a method such as ``items``, which readers call."""
    for name in attributes:
        if not isinstance(name, str) or hasattr(OrderedDict, name):
            raise ValueError(f"an attribute {short(text_of(name))} of an OrderedDict")
    ordered = OrderedDict(mapping)
    vars(ordered).update(attributes)
    return ordered


def join(parent: str, key: object) -> str:
    """Return the dotted path of ``key`` in ``parent``."""
    name = key if isinstance(key, str) else text_of(key)
    return f"{parent}.{name}" if parent else name


def text_of(key: object) -> str:
    """Return the text of a key for messages."""
    try:
        return repr(key)
    except ValueError:  # Python makes no digits of integers as long as that
        return f"({type(key).__name__})"


def short(path: str) -> str:
    """Return a path, cut to the length that a message can have."""
    return path if len(path) <= 200 else f"{path[:200]}…"


VALUES: Final[dict[int, Callable[[bytes], object]]] = {
    Code.INT: lambda payload: int.from_bytes(payload, "little", signed=True),
    Code.STR: lambda payload: payload.decode("utf-8", "surrogatepass"),
    Code.COMPLEX: lambda payload: complex(*struct.unpack("<dd", payload)),
}
"""Makes values of Python's types for :func:`unpack`."""
CONTAINERS: Final[dict[int, Callable[[Any], object]]] = {
    Code.TUPLE: tuple,
    Code.SET: set,
    Code.FROZENSET: frozenset,
    Code.DICT: lambda parts: dict(zip(*parts, strict=True)),
    Code.ORDERED: lambda parts: ordered(*parts),
    Code.COUNTER: Counter,
    Code.DEFAULT: lambda parts: defaultdict(None if parts[0] is None else FACTORIES[parts[0]], parts[1]),
}
_LEFT_OUT: Final = ObjectParts("tensor", {})
_PLAIN: Final[dict[int, Callable[[Any], object]]] = {
    **CONTAINERS,
    Code.SIZE: tuple,
    **dict.fromkeys((Code.INLINE, Code.ARRAY, Code.SCALAR), lambda parts: _LEFT_OUT),
}
_UNPACKED: Final = _PLAIN.keys() | {Code.OBJECT}

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
