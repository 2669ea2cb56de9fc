"""Stand-ins for what a pickle names, so that its data can be read and none of its code is run.

``torch.load(weights_only=True)`` calls nothing but a list of torch's own functions; anything else that a pickle names must be
put in the list by hand. Here that is never the real thing: a stand-in takes down what it was called with, and `revive`
makes plain data of that. So numpy's arrays are read without numpy's unpickler, and objects of other systems without those
(see `foreign`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch

from eventloop.checkpoint.bounds import check_memory
from eventloop.checkpoint.foreign import foreign_objects
from eventloop.checkpoint.rebuild import set_attributes
from eventloop.checkpoint.tree import MAX_DEPTH, MAX_VALUES, join
from eventloop.errors import CheckpointError


class Inert:
    """An object that a pickle asked for: the arguments of its construction, and the state that it was given."""

    name: ClassVar[str]
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        """Take the arguments down, whatever they are."""
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        """Take the state down, whatever it is."""
        self.state = state


def stand_ins() -> list[tuple[type[Inert], str]]:
    """For ``torch.serialization.safe_globals``: a stand-in for every name that `revive` understands."""
    return [(type("StandIn", (Inert,), {"name": name}), name) for name in (*_REVIVE, *foreign_objects(), *_PARTS)]


def revive(value: Any, size: int) -> Any:
    """Return a copy of a tree with plain data in place of stand-ins. Tensors are not copied.

    numpy's arrays and scalars become what they were, objects of other systems what their `ForeignFormat` makes of them. A
    ``bytearray``, which no checkpoint holds, becomes bytes.

    Args:
        value: what torch has read.
        size: bytes of the file; in all, tensors have no more.

    Raises:
        CheckpointError: for a stand-in in a place where it means nothing, with its path; for a tree without end.
    """
    try:
        return _Reviver(size).value("", value, 0)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except TypeError as error:
        raise CheckpointError(f"what stands for an object is the key of a dict, or in a set: {error}") from error


_REPEATED: Final = 1_000_000
"""Values that are there once more, as what holds them is held several times."""


class _Reviver:
    def __init__(self, size: int) -> None:
        self._size = size
        self._foreign = foreign_objects()
        # A pickle may hold one list a thousand times within another that it holds a thousand times …; as a tree without end.
        # What it holds once takes a byte of it at least.
        self._left = self._most = min(MAX_VALUES, size + _REPEATED)
        self._seen: set[int] = set()
        self._stored = self._spread = 0

    def value(self, path: str, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            where = path[:200] or "the tree"
            raise CheckpointError(f"{where}: nested deeper than {MAX_DEPTH} levels, or more than {self._most:,} values in all")
        kind = type(value)
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(path, value, depth + 1)
        if kind in (list, tuple, set):
            return kind(self.value(join(path, index), each, depth + 1) for index, each in enumerate(value))
        if kind is bytearray:
            return bytes(value)
        if isinstance(value, torch.Tensor):
            self._weigh(path, value)
        if isinstance(value, Inert):
            return self._inert(path, value, depth + 1)
        if isinstance(value, type) and issubclass(value, Inert):
            raise _refusal(path, value.name)
        return value

    def _weigh(self, path: str, tensor: torch.Tensor) -> None:
        """Refuse tensors that have more bytes than the file, or that the memory could not hold without their strides."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return  # no checkpoint holds it, which is told when it is saved
        storage = tensor.untyped_storage()
        if id(tensor) not in self._seen:
            self._spread += tensor.numel() * tensor.itemsize
        if storage.data_ptr() not in self._seen:
            self._stored += storage.nbytes()
        self._seen |= {id(tensor), storage.data_ptr()}
        if self._stored > self._size:
            raise CheckpointError(f"{path or 'the tree'}: there are fewer bytes in the file than in its tensors")
        check_memory(self._spread)

    def _mapping(self, path: str, mapping: Any, depth: int) -> Any:
        revived = type(mapping)()
        for key, value in mapping.items():
            revived[self.value(join(path, "(key)"), key, depth)] = self.value(join(path, key), value, depth)
        if type(mapping) is OrderedDict:  # nn.Module.state_dict() keeps versions of modules in an attribute
            set_attributes(revived, self._mapping(join(path, "(attributes)"), vars(mapping), depth))
        return revived

    def _inert(self, path: str, value: Inert, depth: int) -> Any:
        plain, foreign = _REVIVE.get(value.name), self._foreign.get(value.name)
        try:
            if plain is not None:
                return self.value(path, plain(value), depth)
            if foreign is not None:
                return self.value(path, foreign(value.args, value.state), depth)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{path or 'the tree'}: this {value.name} cannot be read ({error})") from error
        raise _refusal(path, value.name)


def _refusal(path: str, name: str) -> CheckpointError:
    return CheckpointError(f"{path or 'the tree'}: a reference to {name}, which is code and no data")


def _array(value: Inert) -> Any:
    _, shape, dtype, fortran, data = value.state
    return _rebuilt_array(dtype, tuple(shape), data, fortran=fortran)


def _scalar(value: Inert) -> Any:
    dtype, data = value.args
    return _rebuilt_array(dtype, (), data, fortran=False)[()]


def _rebuilt_array(dtype: Inert, shape: tuple[int, ...], data: bytes | Inert, *, fortran: bool) -> Any:
    (code, *_), (_, order, *_) = dtype.args, dtype.state
    if not (isinstance(code, str) and re.fullmatch(r"[biufc]\d{1,2}", code) and order in ("<", ">", "|", "=")):
        raise ValueError(f"a dtype {code!r} with byte order {order!r}; only numbers can be read")
    kind = np.dtype(order + code)
    data = data if isinstance(data, bytes) else _bytes(data)
    if len(data) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{kind} of shape {shape}, but not as many bytes")
    return np.ndarray(shape, kind, bytearray(data), order="F" if fortran else "C")


def _bytes(value: Inert) -> bytes:
    # Protocol 2 has no bytes: it names _codecs.encode, which torch knows, and for none at all bytes().
    if value.args:
        raise ValueError("its bytes are made by a call with arguments; only empty ones can be read")
    return b""


# numpy 2 has renamed numpy.core.
_REVIVE: Final[dict[str, Callable[[Inert], Any]]] = {
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "builtins.bytes": _bytes,
}
# These mean something only within one of the above. getattr: how protocol 2 names the methods of objects.
_PARTS: Final = ("numpy.ndarray", "numpy.dtype", "builtins.getattr")
