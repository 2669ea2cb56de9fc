"""Values from text: checked by msgspec, their errors at the right place; and values of the command line."""

from __future__ import annotations

import json
import tomllib
import typing
from typing import Any, Literal

import msgspec

from eventloop.config.annotations import describe, list_item, members, table_value
from eventloop.config.places import inside, shortened, wrong
from eventloop.config.registry import did_you_mean

DEEPEST = 100
"""Levels of tables and lists within each other."""

_LARGEST = 10_000
"""Bits of an integer: fewer than Python refuses to write as a decimal number."""


class FromText(str):
    """A value that was typed on the command line; what it is depends on the option it is for."""

    __slots__ = ()


def check(value: Any, annotation: Any, place: str) -> Any:
    """Return ``value`` as msgspec decodes it for an annotation that is all text.

    Raises:
        ConfigurationError: it is something else; names the innermost place that is wrong.
    """
    lax = isinstance(value, FromText)
    try:
        return msgspec.convert(str(value) if lax else value, annotation, strict=not lax)
    except msgspec.ValidationError:
        for member in members(annotation):
            _check_entries(value, member, place)
        raise wrong(place, unexpected(value, annotation)) from None


def _check_entries(value: Any, member: Any, place: str) -> None:
    inner, listed = table_value(member), list_item(member)
    if isinstance(value, dict) and inner is not None:
        for key, entry in value.items():
            check(entry, inner, inside(place, str(key)))
    if isinstance(value, list | tuple) and listed is not None:
        items = listed[1] if isinstance(listed[1], list) else [listed[1]] * len(value)
        for index, (entry, item) in enumerate(zip(value, items, strict=False)):
            check(entry, item, inside(place, index))


def unexpected(value: Any, annotation: Any) -> str:
    """Return the message for a value that is not what its option takes."""
    choices = [choice for one in members(annotation) if typing.get_origin(one) is Literal for choice in typing.get_args(one)]
    hint = did_you_mean(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
    return f"expected {describe(annotation)}, got {kind_of(value)}{hint}"


def kind_of(value: Any) -> str:
    """Return what a value is, and the value if it is short: ``str 'ten'``, ``a table``."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"str {shortened(str(value))!r}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float) else shortened(repr(value))


def check_bounds(value: Any, place: str) -> None:
    """Raise ConfigurationError for what a file can hold and no option can take: deep nesting, huge integers, odd keys."""
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(one, int) and one.bit_length() > _LARGEST for one in level):
            raise wrong(place, "an integer has thousands of digits; text goes in quotes")
        tables = [one for one in level if isinstance(one, dict)]
        for key in (key for table in tables for key in table if isinstance(key, bool | None)):
            raise wrong(place, f"a key is {key!r} (YAML reads on, off, yes and no as that); put it in quotes")
        lists = [one for one in level if isinstance(one, list)]
        level = [inner for one in (*lists, *(table.values() for table in tables)) for inner in one]
        if not level:
            return
    raise wrong(place, f"is nested too deeply; a configuration has at most {DEEPEST} levels")


def parse(text: str) -> Any:
    """Return what ``text`` is as a value of TOML or JSON; the text itself if it is neither."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        try:
            return json.loads(text)
        except ValueError:
            return str(text)


def settle(value: Any) -> Any:
    """Return a value with all that was typed on the command line parsed, whatever it is for."""
    if isinstance(value, FromText):
        return parse(value)
    if isinstance(value, dict):
        return {key: settle(entry) for key, entry in value.items()}
    return [settle(entry) for entry in value] if isinstance(value, list) else value
