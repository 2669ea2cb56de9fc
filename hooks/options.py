"""Checks of options that hooks and writers share: what cannot work is an error when the object is made."""

from __future__ import annotations

from math import isfinite

from eventloop import ConfigurationError


def checked_count(option: str, value: object, meaning: str) -> int:
    """Return ``value`` if it is a positive integer.

    Raises:
        ConfigurationError: it is not; the message says what ``option`` means.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{option}={value!r}: give {meaning}, a positive integer")
    return value


def checked_flags(**flags: object) -> None:
    """Raise ConfigurationError unless all of them are True or False."""
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{option}={value!r}: give True or False")


def checked_number(option: str, value: object, meaning: str, *, least: float = float("-inf")) -> float:
    """Return ``value`` if it is a finite number, at least ``least``.

    Raises:
        ConfigurationError: it is not; the message says what ``option`` means.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < least:
        raise ConfigurationError(f"{option}={value!r}: give {meaning}" + (f", {least:g} or more" if isfinite(least) else ""))
    return value


def checked_name(option: str, value: object, meaning: str) -> str:
    """Return ``value`` if it is a string with something in it.

    Raises:
        ConfigurationError: it is not; the message says what ``option`` means.
    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{option}={value!r}: give {meaning}")
    return value
