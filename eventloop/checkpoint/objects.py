"""Values that are a named content: an enum's member, a named tuple, a deque, a slice, a sparse tensor.

A tree has the name of the type, and the content under the names of its parts. Types of Python and torch are in a table here. A
class of another package, or of the user, must be an enum or a named tuple, whose values have nothing but their content; it is
found under its name among the modules that are imported already. So reading imports nothing, and runs no code of a class.
Instances of other classes are refused: their ``state_dict()``, or a dict of what they hold, belongs into a checkpoint.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import torch

from trainbus.eventloop.checkpoint.container import NewerError
from trainbus.eventloop.checkpoint.forms import kind_of, with_kind
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.privates import sparse_parts


def taken_apart(value: Any) -> ObjectParts | None:
    """Return the parts of a value; None if it may have others than a checkpoint can hold."""
    kind = type(value)
    if isinstance(value, ObjectParts):
        return value
    if kind in _CONTENT:
        return ObjectParts(kind.__name__, _CONTENT[kind](value))
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        return None
    if isinstance(value, Enum):
        # Several flags in one are no member.
        return ObjectParts(name, {"member": value._name_}) if kind.__members__.get(value._name_) is value else None
    fields = _fields_of(kind) or ()
    complete = len(fields) == len(value) and not getattr(value, "__dict__", None)
    return ObjectParts(name, dict(zip(fields, value, strict=True))) if complete else None


def sparse_apart(tensor: torch.Tensor) -> ObjectParts | None:
    """Return the parts of a sparse tensor, which share its memory; None for a tensor of another layout."""
    plain = tensor.detach()
    rest = {"size": plain.size(), "kind": kind_of(tensor)}
    if plain.layout is torch.sparse_coo:
        indices, values = sparse_parts(plain)
        parts = {"indices": indices, "values": values, "coalesced": plain.is_coalesced()}
    elif plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = {"crow_indices": plain.crow_indices(), "col_indices": plain.col_indices(), "values": plain.values()}
    elif plain.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = {"ccol_indices": plain.ccol_indices(), "row_indices": plain.row_indices(), "values": plain.values()}
    else:
        return None
    return ObjectParts(str(plain.layout).removeprefix("torch."), {**parts, **rest})


def put_together(name: str, content: dict[str, Any]) -> Any:
    """Return the value; raise NewerError if its class is not known here, or not imported."""
    found = together_if_known(name, content)
    if type(found) is ObjectParts:
        module, _, path = name.partition(":")
        what = f"a {path[:60]}; import {module[:60]}, which defines that, before it is read" if path else f"a {name[:60]}"
        raise NewerError(f"it holds {what}, or read its weights alone, by load_weights(model, FILE)")
    return found


def together_if_known(name: str, content: dict[str, Any]) -> Any:
    """Return the value, or its parts if its class is not known here, or not imported."""
    if name in _TOGETHER:
        return _TOGETHER[name](**content)
    kind = _found(name)
    return ObjectParts(name, content) if kind is None else _put_together(kind, content)


def _put_together(kind: Any, content: dict[str, Any]) -> Any:
    if issubclass(kind, Enum):
        member = kind.__members__.get(content["member"])
        if member is None:
            raise NewerError(f"it holds {kind.__qualname__}.{content['member']!s:.60}, which {kind.__module__} does not define")
        return member
    if _fields_of(kind) != tuple(content):
        raise NewerError(f"it holds a {kind.__qualname__} of {', '.join(content)!s:.60}, which has other fields here")
    return tuple.__new__(kind, content.values())


def _found(name: str) -> Any:
    """Return the enum or named tuple of that name, if its module is imported."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr(): a module may import others when it is asked for a name.
        found = getattr(found, "__dict__", {}).get(part)
    known = isinstance(found, type) and (issubclass(found, Enum) or _fields_of(found) is not None)
    return found if known else None


def _fields_of(kind: type) -> tuple[str, ...] | None:
    fields = getattr(kind, "_fields", None)
    return fields if issubclass(kind, tuple) and isinstance(fields, tuple) else None


def _sparse_coo(indices: Any, values: Any, size: Any, coalesced: bool, kind: int) -> torch.Tensor:
    made = torch.sparse_coo_tensor(indices, values, tuple(size), is_coalesced=coalesced or None, check_invariants=True)
    return with_kind(made, kind)


def _compressed(layout: torch.layout, pointers: str, plain: str) -> Callable[..., torch.Tensor]:
    def build(values: Any, size: Any, kind: int, **indices: Any) -> torch.Tensor:
        parts = indices.pop(pointers), indices.pop(plain), values, tuple(size)
        return with_kind(torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True, **indices), kind)

    return build


_CONSTANTS: Final = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.layout | torch.qscheme | torch.memory_format)
}
_CONTENT: Final[dict[type, Callable[[Any], dict[str, Any]]]] = {
    deque: lambda value: {"items": list(value), "maxlen": value.maxlen},
    slice: lambda value: {"start": value.start, "stop": value.stop, "step": value.step},
    range: lambda value: {"start": value.start, "stop": value.stop, "step": value.step},
    bytearray: lambda value: {"content": bytes(value)},
    torch.layout: lambda value: {"name": str(value)},
    torch.qscheme: lambda value: {"name": str(value)},
    torch.memory_format: lambda value: {"name": str(value)},
}
_TOGETHER: Final[dict[str, Callable[..., Any]]] = {
    "deque": lambda items, maxlen: deque(items, maxlen),
    "slice": lambda start, stop, step: slice(start, stop, step),
    "range": lambda start, stop, step: range(start, stop, step),
    "bytearray": lambda content: bytearray(memoryview(content)),  # of a number it would make as many bytes
    **dict.fromkeys(("layout", "qscheme", "memory_format"), lambda name: _CONSTANTS[name]),
    "sparse_coo": _sparse_coo,
    "sparse_csr": _compressed(torch.sparse_csr, "crow_indices", "col_indices"),
    "sparse_bsr": _compressed(torch.sparse_bsr, "crow_indices", "col_indices"),
    "sparse_csc": _compressed(torch.sparse_csc, "ccol_indices", "row_indices"),
    "sparse_bsc": _compressed(torch.sparse_bsc, "ccol_indices", "row_indices"),
}
