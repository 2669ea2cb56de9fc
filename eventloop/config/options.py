"""The options of a class or function, read from its own signature: a typed msgspec struct for each."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from eventloop.config.annotations import describe, is_path, is_text, list_item, members, strip, table_value
from eventloop.config.registry import name_of

_EMPTY = inspect.Parameter.empty


class OptionsOf(msgspec.Struct, frozen=True):
    """Says, on the ``**options`` of a constructor, whose they are: those of the class that another option names.

    ``**options: Annotated[Any, OptionsOf("ema_type")]``
    """

    option: str


class Option(msgspec.Struct, frozen=True):
    """One option: what it may be, and what it is by default."""

    name: str
    annotation: Any
    default: Any
    written: str
    """The annotation as it stands in the source."""

    @property
    def required(self) -> bool:
        """True if there is no default."""
        return self.default is _EMPTY


class Options:
    """The options of ``target``: parameters that a configuration can give by name.

    Attributes:
        label: name of the target in messages.
        known: option by name, in the order of the signature.
        positional: names of those that must be given by position.
        rest: annotation of ``**options``, with its :class:`OptionsOf` if there is one; None if the target has none.
        struct: a msgspec struct with a field for each, its type as far as text can be of it, its default where that is text.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self.label: str = getattr(target, "__name__", type(target).__name__)
        annotations = _annotations(target)
        self.known: dict[str, Option] = {}
        self.positional: list[str] = []
        self.rest: Any = None
        for name, parameter in _parameters(target).items():
            annotation = annotations.get(name, Any)
            if parameter.kind is parameter.VAR_KEYWORD:
                self.rest = annotation
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.known[name] = Option(name, annotation, parameter.default, _written(parameter))
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self.positional.append(name)
        self.struct = msgspec.defstruct(
            _identifier(self.label),
            [_field(option) for option in self.known.values()],
            forbid_unknown_fields=True,
            kw_only=True,
        )

    @property
    def rest_of(self) -> str | None:
        """The option whose class has the further ones; None if that is not said."""
        if typing.get_origin(self.rest) is Annotated:
            return next((mark.option for mark in self.rest.__metadata__ if isinstance(mark, OptionsOf)), None)
        return None

    def defaults(self) -> dict[str, Any]:
        """Return the default of every option that has one, as a configuration would write it, where it can."""
        return {option.name: text for option in self.known.values() if (text := as_text(option.default)) is not msgspec.UNSET}


def as_text(value: Any) -> Any:
    """Return a default as a configuration writes it: a class by its name, a tuple as a list; UNSET where it cannot."""
    if value is _EMPTY:
        return msgspec.UNSET
    if isinstance(value, type):
        return name_of(value) or f"{value.__module__}:{value.__qualname__}"
    try:
        return _lists(msgspec.to_builtins(value, enc_hook=_no_text))
    except (TypeError, NotImplementedError):
        return msgspec.UNSET


def _lists(value: Any) -> Any:
    """Return a value with lists for tuples, as text has them."""
    if isinstance(value, dict):
        return {key: _lists(entry) for key, entry in value.items()}
    return [_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def _no_text(value: Any) -> Any:
    if is_path(type(value)):
        return str(value)
    raise NotImplementedError


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin without a signature takes whatever it is given
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


def _annotations(target: Any) -> dict[str, Any]:
    """Return the resolved annotations by parameter; one that cannot be resolved is left out."""
    function = _function(target)
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # noqa: BLE001 - names that are there for type checkers only, for instance
        raw = dict(getattr(function, "__annotations__", {}))
    # Typing's own names are often imported for type checkers only (torch's schedulers do so).
    names = {**vars(collections.abc), **vars(typing), **getattr(function, "__globals__", {})}
    found: dict[str, Any] = {}
    for name, annotation in raw.items():
        stand_in = type("Alone", (), {"__annotations__": {name: annotation}, "__module__": function.__module__})
        try:
            found |= typing.get_type_hints(stand_in, names, include_extras=True)
        except Exception:  # noqa: BLE001, S112 - this one is not known, then
            continue
    return found


def _function(target: Any) -> Any:
    if isinstance(target, functools.partial):
        return _function(target.func)
    if isinstance(target, type):
        initializer = inspect.getattr_static(target, "__init__")
        return target.__new__ if initializer is object.__init__ else initializer
    return target if inspect.isroutine(target) else type(target).__call__


def _field(option: Option) -> tuple[str, Any, Any]:
    text = _textual(option.annotation)
    default = as_text(option.default)
    if option.required:
        return option.name, text, msgspec.NODEFAULT
    if isinstance(default, list | dict | set):
        return option.name, text, msgspec.field(default_factory=lambda: default.copy())
    return option.name, text, default


def _textual(annotation: Any) -> Any:
    """Return what msgspec is to check: the annotation where it is all text, its containers where they are, else Any."""
    kinds = [_textual_member(member) for member in members(annotation)]
    if Any in kinds:
        return Any
    union: Any = functools.reduce(lambda one, other: one | other, kinds)
    try:
        msgspec.convert(None, union | None)
    except TypeError:  # two kinds of table, say: more than msgspec can tell apart
        return Any
    return union


def _textual_member(member: Any) -> Any:
    member = strip(member)
    if is_text(member):
        return member
    listed = list_item(member)
    if listed is not None:
        container, item = listed
        if isinstance(item, list):
            return tuple[tuple(map(_textual, item))]  # type: ignore[misc]
        return tuple[_textual(item), ...] if container is tuple else container[_textual(item)]  # type: ignore[misc,index]
    value = table_value(member)
    return Any if value is None else dict[str, _textual(value)]  # type: ignore[misc]


def _identifier(label: str) -> str:
    return label if label.isidentifier() else "Options"


def _written(parameter: inspect.Parameter) -> str:
    return "" if parameter.annotation is _EMPTY else describe(parameter.annotation)
