"""Checkpoints of other training systems: how their files are recognised, read and converted to the state of a run.

This package knows none of them. ``register_format`` adds one; `hooks.compat` does so for the systems it supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Converted = tuple[dict[str, Any], dict[str, str]]
"""The state of a run, and what to tell the user about it: a text for each heading."""


class ForeignFormat(NamedTuple):
    """How the checkpoints of one other system are read."""

    recognises: Callable[[Any], bool]
    """Returns True for a tree of this format, as `load_pth` returns it."""
    convert: Callable[[Any], Converted]
    """Returns the state of a run that goes on from such a tree, and notes for the user."""
    objects: Mapping[str, Callable[[tuple[Any, ...], Any], Any]] = {}
    """For each class that its pickles name: makes plain data of an object's construction arguments and state."""


_formats: list[ForeignFormat] = []


def register_format(foreign: ForeignFormat) -> None:
    """Have `load_pth`, `convert_foreign` and thereby ``trainbus checkpoint import`` read this format."""
    _formats.append(foreign)


def convert_foreign(tree: Any) -> Converted | None:
    """Return the state of a run that goes on from ``tree``; None if no registered format recognises it."""
    return next((known.convert(tree) for known in _formats if known.recognises(tree)), None)


def foreign_objects() -> dict[str, Callable[[tuple[Any, ...], Any], Any]]:
    """Return the classes of all registered formats by their full names."""
    return {name: plain for known in _formats for name, plain in known.objects.items()}
