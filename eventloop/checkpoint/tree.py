"""The tree of a checkpoint: everything but the tensors, as MessagePack bytes. ``rebuild`` is the way back.

What MessagePack holds exactly is stored natively (None, bool, 64-bit integers, float, ASCII text, bytes, list, dict
with ASCII keys). Every other type is an extension whose payload is again MessagePack; see ``objects`` for those that are stored
as a name and a content. A tensor is an extension without
payload: the n-th tensor met while reading is the n-th met while writing, so the structure needs no numbering. Small tensors
that come later, from other processes, are in the tree themselves.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import repeat
from pathlib import PurePath
from typing import Any, Final

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from trainbus.eventloop.checkpoint.dtypes import DTYPES
from trainbus.eventloop.checkpoint.forms import kind_of, strides_to_keep
from trainbus.eventloop.checkpoint.objects import sparse_apart, taken_apart
from trainbus.eventloop.checkpoint.unpack import FACTORIES, MAX_DEPTH, MAX_VALUES, Code, ObjectParts, join, short
from trainbus.eventloop.errors import CheckpointValueError

_TENSOR_MARK: Final = Ext(Code.TENSOR, b"")
_TENSOR_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS: Final = frozenset({type(None), bool, float, bytes})
_ONLY_STR: Final = frozenset({str})
_NUMERIC_KINDS: Final = frozenset("biufc")
_pack = msgspec.msgpack.Encoder().encode


class FlatTree:
    """A tree taken apart. It shares only the tensors with the tree, so the caller may change the tree afterwards.

    With ``inline``, the tensors are in ``rest``, and it shares nothing. With ``sparse``, sparse tensors are taken apart, which
    takes a look at each; without, they are among ``tensors``.

    Raises:
        CheckpointValueError: a value that a checkpoint cannot hold, with its path.
    """

    def __init__(self, tree: object, *, inline: bool = False, sparse: bool = False) -> None:
        self._inline, self._sparse = inline, sparse or inline
        self.tensors: list[torch.Tensor] = []
        """In the order they were met."""
        self.parents: list[str] = []
        """For each tensor the path of its container."""
        self.keys: list[object] = []
        """For each tensor its key in that."""
        self.parameters: list[int] = []
        """The indices of those that are of type ``Parameter``."""
        self._open: list[object] = []
        self._values = 0
        try:
            (rest,) = self._children("", ("",), (tree,))
            self.rest = msgspec.Raw(_pack(rest))
        except RecursionError as error:
            raise CheckpointValueError("the tree is nested too deeply for the stack that is left; flatten it") from error
        except (OverflowError, msgspec.EncodeError) as error:  # MessagePack's limits
            raise CheckpointValueError(
                "more than 4 GB of arrays, bytes or text in one value; store arrays as tensors, by torch.from_numpy(...)"
            ) from error

    def path(self, index: int) -> str:
        """Return the dotted path of a tensor."""
        return join(self.parents[index], self.keys[index])

    def _children(self, parent: str, keys: Iterable[object], values: Collection[object]) -> list[object]:
        """Encode the values of a container; every tensor passes here."""
        self._values += len(values)
        if self._values > MAX_VALUES:
            raise CheckpointValueError(
                f"{short(parent) or 'the tree'}: with it there are more than {MAX_VALUES:,} values in all; keep "
                "many numbers in a tensor or a numpy array"
            )
        if values and not self._sparse and (kinds := set(map(type, values))) <= _TENSOR_TYPES:
            # No Python runs per tensor: 20,000 in one container take 2.6 ms instead of 4.4.
            if torch.nn.Parameter in kinds:
                self.parameters += (i for i, one in enumerate(values, len(self.tensors)) if type(one) is torch.nn.Parameter)
            self.tensors.extend(values)  # type: ignore[arg-type]  # looked at above
            self.parents.extend(repeat(parent, len(values)))
            self.keys.extend(keys)
            return [_TENSOR_MARK] * len(values)
        out: list[object] = []
        for key, value in zip(keys, values, strict=True):
            kind = type(value)
            if kind in _TENSOR_TYPES and self._sparse and (parts := sparse_apart(value)):  # type: ignore[arg-type]  # likewise
                out.append(self._object(join(parent, key), parts))
            elif kind in _TENSOR_TYPES and self._inline:
                out.append(_inline(join(parent, key), value))  # type: ignore[arg-type]  # likewise
            elif kind in _TENSOR_TYPES:
                if kind is torch.nn.Parameter:
                    self.parameters.append(len(self.tensors))
                self.tensors.append(value)  # type: ignore[arg-type]  # mypy does not narrow by set membership
                self.parents.append(parent)
                self.keys.append(key)
                out.append(_TENSOR_MARK)
            elif kind in _ATOMS or (kind is dict and _is_version(value)):
                out.append(value)
            elif (encode := _ENCODE.get(kind)) is not None:
                out.append(encode(value))
            else:
                out.append(self._value(join(parent, key), value))
        return out

    def _value(self, path: str, value: object) -> object:
        if isinstance(value, np.generic) and value.dtype.kind in _NUMERIC_KINDS:
            return Ext(Code.SCALAR, _pack((value.dtype.str, value.tobytes())))
        if type(value) is np.ndarray and value.dtype.kind in _NUMERIC_KINDS:
            order = ("F",) if value.flags.fnc else ()  # in the memory's order, as pickle keeps it
            return Ext(Code.ARRAY, _pack((value.dtype.str, value.shape, value.tobytes(*order), *order)))
        encode_container = _ENCODE_CONTAINER.get(type(value))
        if encode_container is None and (parts := taken_apart(value)) is not None:
            value, encode_container = parts, FlatTree._object
        if encode_container is not None:
            self._open.append(value)
            if len(self._open) > MAX_DEPTH:
                if len({id(each) for each in self._open}) < len(self._open):
                    raise CheckpointValueError(f"{short(path)}: the tree contains itself; break the reference cycle")
                raise CheckpointValueError(f"{short(path)}: nested deeper than {MAX_DEPTH} levels; flatten the state")
            encoded = encode_container(self, path, value)
            self._open.pop()
            return encoded
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointValueError(f"{path or 'the tree'}: cannot store an object of type {kind}; {_way_out(value)}")

    def _list(self, path: str, values: list[object]) -> list[object]:
        return self._children(path, range(len(values)), values)

    def _dict(self, path: str, values: Mapping[Any, object]) -> object:
        if set(map(type, values)) <= _ONLY_STR and all(map(str.isascii, values)):
            children = self._children(path, values, values.values())
            if children.count(_TENSOR_MARK) == len(children):  # in a third of the time
                return dict.fromkeys(values, _TENSOR_MARK)
            return dict(zip(values, children, strict=True))
        keys = self._children(f"{path}(key)", range(len(values)), values)
        return Ext(Code.DICT, _pack((keys, self._children(path, values, values.values()))))

    def _ordered(self, path: str, values: OrderedDict[object, object]) -> object:
        # nn.Module.state_dict() keeps the version of each module in an attribute, ``_metadata``.
        if hidden := [name for name in vars(values) if hasattr(OrderedDict, name)]:
            raise CheckpointValueError(f"{path}: attributes of an OrderedDict hide its methods; remove {', '.join(hidden)}")
        return Ext(Code.ORDERED, _pack((self._dict(path, values), self._dict(f"{path}(attributes)", vars(values)))))

    def _default(self, path: str, values: defaultdict[object, object]) -> object:
        factory = values.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise CheckpointValueError(
                f"{path}: cannot store a defaultdict with the factory {factory!r}; "
                f"use one of {', '.join(FACTORIES)}, or dict(...)"
            )
        return Ext(Code.DEFAULT, _pack((name, self._dict(path, values))))

    def _object(self, path: str, parts: ObjectParts) -> object:
        return Ext(Code.OBJECT, _pack((parts.type, self._dict(path, parts.content))))

    def _sequence(self, path: str, values: Iterable[object], *, code: int) -> object:
        return Ext(code, _pack(self._list(path, list(values))))


def packed(tree: object) -> bytes:
    """Return a tree with small tensors as bytes, for :func:`with_list`; raise CheckpointValueError as FlatTree does."""
    return bytes(FlatTree(tree, inline=True).rest)


def with_list(rest: msgspec.Raw, key: str, values: Iterable[bytes]) -> msgspec.Raw:
    """Return the ``rest`` of a dict with a list of packed values under an ASCII key."""
    return with_entries(rest, {key: msgspec.Raw(_pack([msgspec.Raw(value) for value in values]))})


def with_entries(rest: msgspec.Raw, new: Mapping[str, msgspec.Raw]) -> msgspec.Raw:
    """Return the ``rest`` of a dict with packed values under ASCII keys."""
    try:
        return msgspec.Raw(_pack({**msgspec.msgpack.decode(rest, type=dict[str, msgspec.Raw]), **new}))
    except msgspec.ValidationError:
        entries = _entries(rest) | {_pack(key): value for key, value in new.items()}
        return msgspec.Raw(_pack(Ext(Code.DICT, _pack(([msgspec.Raw(name) for name in entries], [*entries.values()])))))


def entries_of(rest: msgspec.Raw, keys: Iterable[str]) -> dict[str, msgspec.Raw]:
    """Return the packed values under those of the ASCII ``keys`` that are in the ``rest`` of a dict, in its order."""
    try:
        found = msgspec.msgpack.decode(rest, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        entries, packed_keys = _entries(rest), {_pack(key): key for key in keys}
        return {packed_keys[name]: value for name, value in entries.items() if name in packed_keys}
    wanted = set(keys)
    return {key: value for key, value in found.items() if key in wanted}


def _entries(rest: msgspec.Raw) -> dict[bytes, msgspec.Raw]:
    """Return the values of a dict whose keys are not all ASCII, by packed key."""
    unpack = msgspec.msgpack.Decoder(tuple[list[msgspec.Raw], list[msgspec.Raw]]).decode
    pairs = zip(*msgspec.msgpack.decode(rest, ext_hook=lambda code, payload: unpack(payload)), strict=True)
    return {bytes(name): value for name, value in pairs}


def _inline(path: str, tensor: torch.Tensor) -> object:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointValueError(f"{path}: cannot store a {tensor.layout} tensor of {name} on {tensor.device}")
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Ext(Code.INLINE, _pack((name, tensor.shape, data, strides_to_keep(tensor), kind_of(tensor))))


def _is_version(value: Any) -> bool:
    """Return True for ``{"version": 1}``, of which a ``state_dict`` has one for each module; quick, for 10,000 of them."""
    return len(value) == 1 and type(version := value.get("version")) is int and 0 <= version < 2**63


def _encode_int(value: int) -> object:
    if -(2**63) <= value < 2**64:
        return value
    return Ext(Code.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _encode_str(value: str) -> object:
    # Text from file names may hold lone surrogates, which UTF-8 cannot encode.
    return value if value.isascii() else Ext(Code.STR, value.encode("utf-8", "surrogatepass"))


_ENCODE: Final[dict[type, Callable[[Any], object]]] = {
    int: _encode_int,
    str: _encode_str,
    complex: lambda value: Ext(Code.COMPLEX, struct.pack("<dd", value.real, value.imag)),
    torch.dtype: lambda value: Ext(Code.DTYPE, str(value).removeprefix("torch.").encode()),
    torch.device: lambda value: Ext(Code.DEVICE, str(value).encode()),
}
_ENCODE_CONTAINER: Final[dict[type, Callable[[FlatTree, str, Any], object]]] = {
    list: FlatTree._list,
    dict: FlatTree._dict,
    OrderedDict: FlatTree._ordered,
    Counter: lambda tree, path, values: Ext(Code.COUNTER, _pack(tree._dict(path, values))),
    defaultdict: FlatTree._default,
    tuple: partial(FlatTree._sequence, code=Code.TUPLE),
    torch.Size: partial(FlatTree._sequence, code=Code.SIZE),
    set: partial(FlatTree._sequence, code=Code.SET),
    frozenset: partial(FlatTree._sequence, code=Code.FROZENSET),
}


def _way_out(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "store a plain tensor instead (x.full_tensor() for a DTensor, x.as_subclass(torch.Tensor) for others)"
    if isinstance(value, np.ndarray | np.generic):
        return "store a plain numpy array of numbers, or its tolist(), instead"
    if isinstance(value, Enum):
        return "store its value instead; a member of an enum that a module defines is stored as it is"
    for base in (dict, list, tuple, set, str, int, float, PurePath):
        if isinstance(value, base):
            return f"store {'str' if base is PurePath else base.__name__}(...) of it instead"
    for method in ("state_dict", "get_state", "getstate", "tolist", "isoformat"):
        if hasattr(value, method):
            return f"store its {method}() instead"
    return "store its numbers, texts, tensors and containers of them, and rebuild it when loading"
