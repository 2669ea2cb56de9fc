"""The options of a class or function, read from its own signature, and what their annotations allow."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeVar, Union

import msgspec

_EMPTY: Any = inspect.Parameter.empty
_SCALARS: tuple[Any, ...] = (bool, int, float, str, bytes, type(None))
_LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set)
_TABLES = (dict, abc.Mapping, abc.MutableMapping)


class OptionsOf(msgspec.Struct, frozen=True):
    """Marks the ``**options`` of a constructor as those of the class that another option names.

    ``**options: Annotated[Any, OptionsOf("ema_type")]``
    """

    option: str


class Option(NamedTuple):
    """One option of a class or function."""

    name: str
    annotation: Any
    default: Any = _EMPTY

    @property
    def required(self) -> bool:
        """True if there is no default."""
        return self.default is _EMPTY


class Signature:
    """What ``target`` takes.

    Attributes:
        label: name of the target in messages.
        options: parameters that a configuration can give by name, in their order.
        positional: names of those that must be given by position.
        rest: annotation of ``**options``; None if the target has none.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self.label: str = getattr(target, "__name__", type(target).__name__)
        annotations = _annotations(_function(target))
        self.options: dict[str, Option] = {}
        self.positional: list[str] = []
        self.rest: Any = None
        for name, parameter in _parameters(target).items():
            annotation = annotations.get(name, Any)
            if parameter.kind is parameter.VAR_KEYWORD:
                self.rest = annotation
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.options[name] = Option(name, annotation, parameter.default)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self.positional.append(name)

    @property
    def rest_of(self) -> str | None:
        """The option whose class takes ``**options``; None if they are not marked with :class:`OptionsOf`."""
        marks = getattr(self.rest, "__metadata__", ())
        return next((mark.option for mark in marks if isinstance(mark, OptionsOf)), None)


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin without a signature takes any options
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


def _function(target: Any) -> Any:
    if isinstance(target, functools.partial):
        return _function(target.func)
    if isinstance(target, type):
        initializer = inspect.getattr_static(target, "__init__")
        return target.__new__ if initializer is object.__init__ else initializer
    return target if inspect.isroutine(target) else type(target).__call__


def _annotations(function: Any) -> dict[str, Any]:
    """Return the resolved annotations by parameter; one that cannot be resolved is left out."""
    # Torch's schedulers import typing's own names for type checkers only.
    names = {**vars(abc), **vars(typing), **getattr(inspect.unwrap(function), "__globals__", {})}
    found: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = type("Alone", (), {"__annotations__": {name: annotation}})
        try:
            found |= typing.get_type_hints(alone, names, include_extras=True)
        except Exception:  # noqa: BLE001, S112 - a name that only type checkers have, for instance
            continue
    return found


# ------------------------------------------------------------------------------------------------------- annotations


class Member(NamedTuple):
    """One member of the union that an annotation is.

    Attributes:
        form: ``text`` is all that msgspec decodes as it stands: a scalar, a Literal, an Enum, a record.
        annotation: as the signature has it.
        base: the container of a list; the class of which a value is an object, or a subclass.
        inner: annotation of the entries of a list or table; a list of them for a tuple of fixed length.
    """

    form: Literal["any", "text", "list", "table", "path", "function", "class", "object"]
    annotation: Any
    base: type | None = None
    inner: Any = Any


def members(annotation: Any) -> list[Member]:
    """Return the members of a union, or the annotation alone."""
    annotation = _stripped(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [one for member in typing.get_args(annotation) for one in members(member)]
    return [_member(annotation)]


def _stripped(annotation: Any) -> Any:
    """Return an annotation without Annotated, Final, NewType and type variables around it."""
    while True:
        if typing.get_origin(annotation) in (Annotated, typing.Final):
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        else:
            return type(None) if annotation is None else annotation


def _member(annotation: Any) -> Member:
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    base = origin if isinstance(origin, type) else None
    if annotation in (Any, object, _EMPTY):
        return Member("any", Any)
    if origin in _LISTS:
        container = base if base in (tuple, set, frozenset) else list
        fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis
        return Member("list", annotation, container, list(arguments) if fixed else (*arguments, Any)[0])
    if origin in _TABLES:
        return Member("table", annotation, dict, arguments[1] if len(arguments) == 2 else Any)
    if _is_text(annotation):
        return Member("text", annotation)
    if origin is abc.Callable:
        return Member("function", annotation)
    if origin is type:
        asked = _stripped(arguments[0]) if arguments else object
        return Member("class", annotation, asked if isinstance(asked, type) else object)
    if base is not None and issubclass(base, os.PathLike):
        return Member("path", annotation, base)
    return Member("object", annotation, base)


def _is_text(annotation: Any) -> bool:
    if annotation in _SCALARS or typing.get_origin(annotation) is Literal:
        return True
    if not isinstance(annotation, type):
        return False
    is_record = issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(annotation)
    return issubclass(annotation, Enum) or ((is_record or typing.is_typeddict(annotation)) and _decodable(annotation))


def _decodable(annotation: type) -> bool:
    try:
        found = msgspec.inspect.type_info(annotation)
    except Exception:  # noqa: BLE001 - resolving foreign annotations may raise anything
        return False
    return not any(isinstance(field.type, msgspec.inspect.CustomType) for field in getattr(found, "fields", ()))


def describe(annotation: Any) -> str:
    """Return an annotation as people write it."""
    return " | ".join(map(_described, members(annotation)))


def _described(member: Member) -> str:
    annotation, inner = member.annotation, member.inner
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return " | ".join(map(repr, arguments))
    if annotation is type(None):
        return "None"
    if member.form == "function":
        return "function"
    if member.form == "table" or (member.form == "list" and not isinstance(inner, list)):
        return member.form if inner is Any else f"{member.form} of {describe(inner)}"
    if not arguments:
        return getattr(annotation, "__name__", str(annotation).removeprefix("typing."))
    name = getattr(typing.get_origin(annotation), "__name__", annotation)
    return f"{name}[{', '.join(map(describe, arguments))}]"
