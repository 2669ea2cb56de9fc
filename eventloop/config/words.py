"""Words of error messages: where in a configuration a value stands (``custom_hooks[2].interval``), and what it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from eventloop.errors import ConfigurationError


def inside(where: str, key: str | int) -> str:
    """Return the position of an entry of the table or list at ``where``."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    shown = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{where}.{shown}" if where else shown


def wrong(where: str, message: str) -> ConfigurationError:
    """Return the error for the value at ``where``."""
    return ConfigurationError(f"{where}: {message}" if where else message)


def shortened(text: str, most: int = 80) -> str:
    """Return a text for a message, cut if it is long."""
    return text if len(text) <= most else f"{text[:most]}…"


def kind_of(value: Any) -> str:
    """Return the type of a value, and the value if it is short: ``str 'ten'``, ``a table``."""
    if isinstance(value, dict | list | tuple):
        return "a table" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"str {shortened(str(value))!r}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float) else shortened(repr(value))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'this' or 'that'?)"``, or nothing where no name is near."""
    lower = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), lower, n=2, cutoff=0.6)
    near = near or [one for one in lower if len(name) > 2 and name.lower() in one][:2]
    return f" (did you mean {' or '.join(repr(lower[one]) for one in near)}?)" if near else ""


def check_keys(table: Mapping[str, object], known: Iterable[str], where: str, whose: str) -> None:
    """Raise ConfigurationError for a key of ``table`` that is not among those of ``whose``."""
    names = list(dict.fromkeys(known))
    for key in table:
        if key not in names:
            hint = did_you_mean(str(key), names) or f"; there are {', '.join(names) or 'none'}"
            raise wrong(inside(where, str(key)), f"{whose} has no option {str(key)!r}{hint}")
