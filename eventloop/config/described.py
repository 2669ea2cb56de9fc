"""What a value in a configuration is meant as, judged by how it looks and by what its option takes."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Mapping
from typing import Any

from eventloop.config import annotations as of
from eventloop.config.places import wrong
from eventloop.config.references import is_reference
from eventloop.config.registry import did_you_mean, kind_of_base
from eventloop.config.values import FromText, parse

MISSING: Any = object()
"""For a value that is none of what is looked for."""


def is_meant_as_text(value: Any, annotation: Any, texts: list[Any]) -> bool:
    """True if a text is no name of an object or class: where text will do, and where it looks like none."""
    if str in texts or of.is_path(annotation) or set(texts) <= {type(None)}:
        return str in texts
    asked = of.class_asked_for(annotation) or of.object_asked_for(annotation)
    return not is_reference(value) and (asked is None or kind_of_base(asked) is None)


def parsed(value: FromText, options: list[Any]) -> Any:
    """Parse what was typed as a list or table, where the option takes one; the rest is up to its type."""
    composite = any(of.list_item(one) is not None or not (of.is_text(one) or of.is_path(one)) for one in options)
    found = parse(value) if composite else value
    return found if isinstance(found, list | dict) else value


def missing_type(table: Mapping[str, Any]) -> str:
    """Return a hint if a key of ``table`` looks like a misspelt ``type``."""
    near = [str(key) for key in table if did_you_mean(str(key), ["type"])]
    return f" (is {near[0]!r} it, misspelt?)" if near else ""


def as_it_is(value: Any, expected: Any) -> Any:
    """Objects reach a list of hooks in Python as they are."""
    return value if isinstance(expected, type) and isinstance(value, expected) else MISSING


def is_callable(target: Any) -> bool:
    """True for what is called to make an object: a class or a function (and not an object that can be called, too)."""
    return isinstance(target, type | functools.partial) or inspect.isroutine(target)


def alone(target: Any, options: Mapping[str, Any], place: str) -> Any:
    """Return an object that is named; raise ConfigurationError if it is given options."""
    if options:
        raise wrong(place, f"{target!r} is an object, which takes no options ({', '.join(options)})")
    return target


def raised_within(error: Exception, package: str) -> bool:
    """True if all that was called by the caller of this, up to where ``error`` was raised, is in a package."""
    called = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return bool(called) and all(f"{name}.".startswith(f"{package}.") for name in called)


def an(cls: type) -> str:
    """Return the name of a class with its article."""
    return f"a{'n' * (cls.__name__[0] in 'AEIOU')} {cls.__name__}"
