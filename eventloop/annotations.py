"""Read annotations: the options of a signature, the fields of a class, and the members of a union."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeVar, Union

import msgspec

R = TypeVar("R")

_EMPTY = inspect.Parameter.empty
_SCALARS = (bool, int, float, str, bytes)
_LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, abc.Set)
_TABLES = (dict, abc.Mapping, abc.MutableMapping)


def known(read: Callable[[Any], R]) -> Callable[[Any], R]:
    """Cache a function of an annotation."""
    cached = functools.cache(read)

    @functools.wraps(read)
    def found(annotation: Any) -> R:
        try:
            return cached(annotation)
        except TypeError:  # Annotated with a list, a dict ..., which cannot be hashed
            return read(annotation)

    return found


def fields_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a class's fields, with their marks; raise NameError for a name that its module lacks."""
    return typing.get_type_hints(kind, include_extras=True)


class OptionsOf(msgspec.Struct, frozen=True):
    """Mark the ``**options`` of a constructor as options of the class that another option names.

    ``**options: Annotated[Any, OptionsOf("ema_type")]``
    """

    option: str


class Signature:
    """The options of a class or function.

    ``options`` are the parameters that a configuration can give by name, in order, with resolved annotations. ``rest`` is the
    annotation of ``**options``, or None; ``rest_of`` names the option whose class takes them, see :class:`OptionsOf`. ``label``
    and the further keys ``also`` are for messages.
    """

    def __init__(self, target: Callable[..., Any], *, label: str = "", also: Sequence[str] = ()) -> None:
        self.target = target
        self.label: str = label or getattr(target, "__name__", type(target).__name__)
        self.also = also
        # Torch's schedulers import names from typing under TYPE_CHECKING only.
        names = {**vars(abc), **vars(typing), **getattr(inspect.unwrap(_function(target)), "__globals__", {})}
        self.options: dict[str, inspect.Parameter] = {}
        self.rest: Any = None
        try:
            parameters = list(inspect.signature(target).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature takes any options
            parameters = [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]
        for one in parameters:
            annotation = _resolved(one.annotation, names)
            if one.kind is one.VAR_KEYWORD:
                self.rest = annotation
            elif one.kind is not one.VAR_POSITIONAL:
                self.options[one.name] = one.replace(annotation=annotation)
        marks = getattr(self.rest, "__metadata__", ())
        self.rest_of: str | None = next((mark.option for mark in marks if isinstance(mark, OptionsOf)), None)


def _function(target: Any) -> Any:
    if isinstance(target, functools.partial):
        return _function(target.func)
    if isinstance(target, type):
        initializer = inspect.getattr_static(target, "__init__")
        return target.__new__ if initializer is object.__init__ else initializer
    return target if inspect.isroutine(target) else type(target).__call__


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    holder = type("Holder", (), {"__annotations__": {"it": annotation}})
    try:
        return Any if annotation is _EMPTY else typing.get_type_hints(holder, names, include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - such as a name that only type checkers import
        return Any


class Member(NamedTuple):
    """One member of an annotation's union. msgspec decodes the forms ``text`` (a scalar, Literal or Enum) and ``record``."""

    form: Literal["any", "text", "record", "list", "table", "path", "function", "class", "object"]
    annotation: Any
    shown: str  # in messages
    base: type | None = None  # container of a list, class of an object, or base of a class
    inner: Any = Any  # annotation of the entries, or a list of annotations for a tuple of fixed length
    bounds: msgspec.Meta | None = None  # the bounds and the description that ``Annotated`` gives


def describe(annotation: Any) -> str:
    """Return an annotation as text for messages."""
    return " | ".join(one.shown for one in members(annotation))


@known
def members(annotation: Any) -> tuple[Member, ...]:
    """Return the members of a union, or the annotation alone."""
    bounds = None
    while typing.get_origin(annotation) in (Annotated, typing.Final) or isinstance(annotation, NewType | TypeVar):
        if isinstance(annotation, NewType | TypeVar):
            annotation = getattr(annotation, "__supertype__", None) or getattr(annotation, "__bound__", None) or Any
        else:
            annotation, *marks = typing.get_args(annotation)
            bounds = next((mark for mark in marks if isinstance(mark, msgspec.Meta)), bounds)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        found = chain.from_iterable(map(members, typing.get_args(annotation)))
        return tuple(one._replace(bounds=one.bounds or bounds) for one in found)
    return (_member(annotation)._replace(bounds=bounds),)


def _member(annotation: Any) -> Member:
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    base = origin if isinstance(origin, type) else None
    if annotation in (Any, object):
        return Member("any", Any, "Any")
    if annotation in (None, type(None)):
        return Member("text", type(None), "None")
    if origin is Literal:
        return Member("text", annotation, " | ".join(map(repr, arguments)))
    if origin is abc.Callable:
        return Member("function", annotation, "function")
    name: str = getattr(origin, "__name__", str(annotation).removeprefix("typing."))
    shown = f"{name}[{', '.join(describe(one) for one in arguments if one is not ...)}]" if arguments else name
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return Member("list", annotation, shown, tuple, list(arguments))
    if origin in _LISTS:
        inner = arguments[0] if arguments else Any
        container = base if base in (tuple, set, frozenset) else list
        return Member("list", annotation, "list" if inner is Any else f"list of {describe(inner)}", container, inner)
    if origin in _TABLES:
        inner = arguments[1] if len(arguments) == 2 else Any
        return Member("table", annotation, "table" if inner is Any else f"table of {describe(inner)}", dict, inner)
    if origin is type:
        return Member("class", annotation, shown, (members(arguments[0])[0].base if arguments else None) or object)
    if annotation in _SCALARS or (base is not None and issubclass(base, Enum)):
        return Member("text", annotation, shown)
    if base is not None and (issubclass(base, msgspec.Struct) or dataclasses.is_dataclass(base) or typing.is_typeddict(base)):
        return Member("record", annotation, shown, None if typing.is_typeddict(base) else base)
    return Member("path" if base is not None and issubclass(base, os.PathLike) else "object", annotation, shown, base)
