"""Where in a configuration something stands, and errors that begin with it: ``custom_hooks[2].interval``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from eventloop.config.registry import did_you_mean
from eventloop.errors import ConfigurationError


def inside(place: str, key: str | int) -> str:
    """Return the place of an entry of the table or list at ``place``."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    shown = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{place}.{shown}" if place else shown


def shortened(text: str, most: int = 80) -> str:
    """Return a text for a message, cut if it is long."""
    return text if len(text) <= most else f"{text[:most]}…"


def wrong(place: str, message: str) -> ConfigurationError:
    """Return the error for what is wrong at ``place``."""
    return ConfigurationError(f"{place}: {message}" if place else message)


def check_keys(table: Mapping[str, object], known: Iterable[str], place: str, whose: str) -> None:
    """Raise ConfigurationError for a key of ``table`` that is not among those of ``whose``."""
    names = list(dict.fromkeys(known))
    for key in table:
        if key not in names:
            hint = did_you_mean(str(key), names) or f"; there are {', '.join(names) or 'none'}"
            raise wrong(inside(place, str(key)), f"{whose} has no option {str(key)!r}{hint}")
