"""What the annotation of an option says about values that come from text."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import inspect
import os
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, TypeVar, Union

import msgspec

SCALARS: tuple[Any, ...] = (bool, int, float, str, bytes, type(None))
_LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set)
_TABLES = (dict, abc.Mapping, abc.MutableMapping)
_UNIONS = (Union, types.UnionType)


def strip(annotation: Any) -> Any:
    """Return an annotation without what wraps it: ``Annotated``, ``Final``, NewType, an unbound type variable."""
    while True:
        if typing.get_origin(annotation) in (Annotated, typing.Final, typing.ClassVar):
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif annotation in (inspect.Parameter.empty, object):
            return Any
        else:
            return type(None) if annotation is None else annotation


def members(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation alone."""
    annotation = strip(annotation)
    if typing.get_origin(annotation) in _UNIONS:
        return [one for member in typing.get_args(annotation) for one in members(member)]
    return [annotation]


def list_item(annotation: Any) -> tuple[type, list[Any] | Any] | None:
    """Return the container and item of a list-like annotation, the items of a tuple of fixed length; None for others."""
    origin = typing.get_origin(annotation) or annotation
    if origin not in _LISTS:
        return None
    arguments = list(typing.get_args(annotation))
    container = origin if origin in (tuple, set, frozenset) else list
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return tuple, arguments
    return container, arguments[0] if arguments else Any


def table_value(annotation: Any) -> Any | None:
    """Return the annotation of the values of a mapping; None for what is no mapping."""
    origin = typing.get_origin(annotation) or annotation
    if origin not in _TABLES:
        return None
    arguments = typing.get_args(annotation)
    return arguments[1] if len(arguments) == 2 else Any


def is_text(annotation: Any) -> bool:
    """True for a type that msgspec decodes as it stands: a scalar, a Literal, an Enum, a struct, dataclass or TypedDict."""
    if annotation in SCALARS or typing.get_origin(annotation) is Literal:
        return True
    if not isinstance(annotation, type):
        return False
    if issubclass(annotation, Enum):
        return True
    return _is_record(annotation) and _decodable(annotation)


def is_path(annotation: Any) -> bool:
    """True for ``Path`` and its relatives."""
    return isinstance(annotation, type) and issubclass(annotation, Path | os.PathLike)


def is_function(annotation: Any) -> bool:
    """True for ``Callable[...]``."""
    return typing.get_origin(annotation) is abc.Callable or annotation is abc.Callable


def class_asked_for(annotation: Any) -> type | None:
    """Return X of ``type[X]``; None for other annotations."""
    if annotation is type:
        return object
    if typing.get_origin(annotation) is not type:
        return None
    asked = strip(typing.get_args(annotation)[0])
    return asked if isinstance(asked, type) else object


def object_asked_for(annotation: Any) -> type | None:
    """Return the class whose objects a value has to be one of; None for an annotation that is no class."""
    origin = typing.get_origin(annotation) or annotation
    return origin if isinstance(origin, type) else None


def describe(annotation: Any) -> str:
    """Return an annotation as people write it."""
    if isinstance(annotation, str):
        return annotation
    parts = members(annotation)
    if len(parts) > 1:
        return " | ".join(describe(part) for part in parts)
    only = parts[0]
    if typing.get_origin(only) is Literal:
        return " | ".join(repr(value) for value in typing.get_args(only))
    if only is type(None):
        return "None"
    if typing.get_origin(only) is None and list_item(only) is None and table_value(only) is None:
        return getattr(only, "__name__", str(only).removeprefix("typing."))
    if is_function(only):
        return "function"
    if (value := table_value(only)) is not None:
        return "table" if value is Any else f"table of {describe(value)}"
    if (listed := list_item(only)) is not None and not isinstance(listed[1], list):
        return "list" if listed[1] is Any else f"list of {describe(listed[1])}"
    arguments = ", ".join("..." if one is Ellipsis else describe(one) for one in typing.get_args(only))
    return f"{getattr(typing.get_origin(only), '__name__', only)}[{arguments}]"


def _is_record(annotation: type) -> bool:
    return issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation)


def _decodable(annotation: type) -> bool:
    try:
        found = msgspec.inspect.type_info(annotation)
    except Exception:  # noqa: BLE001 - whatever resolving somebody's annotations raises
        return False
    return not any(isinstance(field.type, msgspec.inspect.CustomType) for field in getattr(found, "fields", ()))
