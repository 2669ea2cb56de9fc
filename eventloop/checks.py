"""Check what a constructor is given against its own annotations."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

import msgspec

from eventloop.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")

_SCALARS = (bool, int, float, str, type(None))
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "None",
    type: "a class",
    Callable: "a function",
    Mapping: "a mapping",
    Sequence: "a list",
    Iterable: "an iterable",
}


def check_options(init: Callable[P, R]) -> Callable[P, R]:
    """Decorate a constructor or method: an argument that its annotation does not allow raises ConfigurationError.

        @check_options
        def __init__(self, interval: Annotated[int, msgspec.Meta(ge=1)] = 10, by_epoch: bool = True) -> None: ...

    Nothing is converted: ``"3"`` and ``True`` are no integers. msgspec checks scalars, literals and bounds; of a list, mapping,
    function or object the kind is checked, and what is in it is up to the constructor.
    """
    named = [one.name for one in inspect.signature(init).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    annotations = functools.cache(lambda: typing.get_type_hints(init, include_extras=True))  # not yet: names may come later

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        # A missing or unknown argument, and one too many, are Python's to tell.
        for option, value in (*zip(named[1:], args[1:], strict=False), *kwargs.items()):
            if option in annotations() and not _allows(annotations()[option], value):
                raise ConfigurationError(f"{option}={_shown(value)}: give {_described(annotations()[option])}")
        return init(*args, **kwargs)

    return checked


def _shown(value: object) -> str:
    """Return the value as it is written, or its type where that takes many words (a module, a tensor)."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def check_flag(name: str, value: object) -> None:
    """Raise ConfigurationError unless ``value`` is a bool: the text "no" would be true."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give True or False")


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _parts(member: Any) -> tuple[Any, msgspec.Meta | None]:
    """Return a member of a union without ``Annotated``, and the bounds that were in there."""
    if typing.get_origin(member) is not Annotated:
        return member, None
    bare, *marks = typing.get_args(member)
    return bare, next((mark for mark in marks if isinstance(mark, msgspec.Meta)), None)


def _allows(annotation: Any, value: Any) -> bool:
    return any(_allows_one(member, value) for member in _members(annotation))


def _allows_one(member: Any, value: Any) -> bool:
    bare, _ = _parts(member)
    kind = typing.get_origin(bare) or bare
    if kind in _SCALARS or kind is Literal:
        try:
            msgspec.convert(float(value) if isinstance(value, float) else value, member)  # numpy's floats are floats
        except msgspec.ValidationError:
            return False
        return True
    if isinstance(value, str) and kind in (Sequence, Iterable):
        return False  # of its letters: never meant
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol that cannot be asked for
        return True


def _described(annotation: Any) -> str:
    return ", or ".join(map(_described_one, _members(annotation)))


def _described_one(member: Any) -> str:
    bare, bounds = _parts(member)
    kind = typing.get_origin(bare) or bare
    if kind is Literal:
        return " or ".join(f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in typing.get_args(bare))
    name = getattr(kind, "__name__", str(kind))
    words = _WORDS.get(kind) or f"a{'n' * (name[0] in 'AEIOU')} {name}"
    if bounds is None:
        return words
    told = {"of at least": bounds.ge, "above": bounds.gt, "of at most": bounds.le, "below": bounds.lt}
    limits = " and ".join(f"{where} {bound:g}" for where, bound in told.items() if bound is not None)
    return bounds.description or f"{words} {limits}".rstrip()
