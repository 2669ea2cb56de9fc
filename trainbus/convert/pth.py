"""Read a file of ``torch.save`` without running any of it.

``torch.load(weights_only=True)`` calls only a list of torch's own functions. Any other name in a pickle must be added to that
list. Here the added object is never the real one, but a placeholder that records its arguments, from which plain data are made:
objects of other systems are read without these systems, and arrays without numpy's unpickler, which trusts what it is given
(``np.dtype("f8").__setstate__`` takes fields of Python objects, and reading one then ends the process).
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

import torch

from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.checkpoint.pickled import load_pickled as load_plain
from trainbus.eventloop.checkpoint.rebuild import convert_parts, number_array
from trainbus.eventloop.checkpoint.unpack import MAX_DEPTH
from trainbus.eventloop.errors import CheckpointError

_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple, set})

ToPlain = Callable[[tuple[Any, ...], Any], Any]
"""Makes plain data of an object's construction arguments and state."""


def register_objects(objects: Mapping[str, ToPlain]) -> None:
    """Let :func:`load_pth` read objects of further classes, given by their full names."""
    _objects.update(objects)


def load_pth(path: str | os.PathLike[str]) -> Any:
    """Read a file of ``torch.save`` by ``torch.load(weights_only=True, mmap=True)``, and check the checksums in it first.

    Beyond what torch allows, numpy's arrays and scalars, ``argparse.Namespace`` (a dict) and the objects of
    :func:`register_objects` are read. A ``bytearray`` becomes bytes. For the time of the call, the placeholders of these are
    in ``torch.serialization``'s list, which is one for all threads.

    Returns:
        The tree, with all tensors on the CPU. Their bytes are read from the file when they are used: until then it must not
        be written to.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: the bytes differ from those that were written.
        CheckpointError: not a file of ``torch.save``, or it names code that would have to be run (the error lists all names).
    """
    path = Path(path)
    return load_pickled(path, path)


def load_pickled(source: Path | bytes | memoryview, name: object) -> Any:
    """Read a file of ``torch.save``, or its bytes, as :func:`load_pth` does; ``name`` names it in errors."""
    load_builtin("compat")  # registers the objects of other systems
    placeholders: list[Any] = [(_placeholder(one), one) for one in (*_objects, *_PARTS)]
    with torch.serialization.safe_globals(placeholders):
        tree = load_plain(source, name)
    try:
        return _plain(tree, "", {})
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{name}: {error}") from error


class Placeholder:
    """Stands for an object in a pickle: the arguments of its construction, and its state."""

    name: ClassVar[str]
    """The full name of its class."""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Self:  # noqa: D102 - any arguments
        self = object.__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @staticmethod
    def kind(name: str) -> type[Placeholder]:
        """Return a new class of placeholders for a class with this full name."""
        return type("Placeholder", (Placeholder,), {"name": name})


_placeholder: Final = cache(Placeholder.kind)


def _plain(value: Any, path: str, done: dict[int, tuple[Any, Any]], depth: int = 0) -> Any:
    """Copy a tree with plain data in place of placeholders; what it holds several times is one object in the copy, too."""
    kind, where = type(value), path or "the tree"
    if kind is bytearray:
        return bytes(value)
    if isinstance(value, type) and issubclass(value, Placeholder):
        raise CheckpointError(f"{where}: a reference to {value.name}, which is code, not data")
    if kind not in _CONTAINERS and not isinstance(value, Placeholder):
        return value
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where[:200]}: nested deeper than {MAX_DEPTH} levels")
    if id(value) in done:
        return done[id(value)][1]
    inner = partial(_plain, done=done, depth=depth + 1)
    if kind in _CONTAINERS:
        plain = convert_parts(value, path, inner)
    elif value.name not in _objects:
        raise CheckpointError(f"{where}: an object {value.name}, which is code, not data")
    else:
        try:
            plain = inner(_objects[value.name](value.args, value.state), path)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{where}: this {value.name} cannot be read ({error})") from error
    done[id(value)] = value, plain  # with the value, so that its id stays its own
    return plain


def _array(args: tuple[Any, ...], state: Any) -> Any:
    _, shape, dtype, fortran, data = state
    return _numbers(dtype, data, tuple(shape), "F" if fortran else "C")


def _numbers(dtype: Placeholder, data: bytes | Placeholder, shape: tuple[int, ...] = (), order: Literal["C", "F"] = "C") -> Any:
    (code, *_), (_, bytes_order, *_) = dtype.args, dtype.state
    data = _bytes(data.args, data.state) if isinstance(data, Placeholder) else data
    return number_array(f"{bytes_order}{code}", shape, data, order)


def _bytes(args: tuple[Any, ...], state: Any) -> bytes:
    # Protocol 2 has no bytes: it names _codecs.encode, which torch knows, and for none at all bytes().
    if args:
        raise ValueError("its bytes are made by a call with arguments; only empty ones can be read")
    return b""


# numpy 2 has renamed numpy.core.
_objects: Final[dict[str, ToPlain]] = {
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": lambda args, state: _numbers(*args)[()],
    "numpy._core.multiarray.scalar": lambda args, state: _numbers(*args)[()],
    "builtins.bytes": _bytes,
    "argparse.Namespace": lambda args, state: dict(state),
}
# These mean something only within one of the above. getattr: how protocol 2 names the methods of objects.
_PARTS: Final = ("numpy.ndarray", "numpy.dtype", "builtins.getattr")
