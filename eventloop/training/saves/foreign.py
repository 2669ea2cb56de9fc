"""Checkpoints of other systems as the state of a run: the parts around the engine register what converts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from trainbus.eventloop.builtin import load_builtin

Converted = tuple[dict[str, Any], dict[str, str]]
"""The state of a run, and notes for the user: a text for each heading."""


class ForeignFormat(NamedTuple):
    """The functions that convert the checkpoints of another system."""

    recognises: Callable[[Any], bool]
    """Returns True for a tree of this format, as ``torch.load`` or :func:`trainbus.convert.load_pth` returns it."""
    convert: Callable[[Any], Converted]
    """Returns the state of a run that continues from such a tree, and notes for the user."""


_formats: Final[list[ForeignFormat]] = []


def register_format(foreign: ForeignFormat) -> None:
    """Register a format for ``convert_foreign``, ``run.checkpoints.apply_state`` and ``trainbus checkpoint import``."""
    _formats.append(foreign)


def convert_foreign(tree: Any) -> Converted | None:
    """Return the state of a run that continues from ``tree``; None if no registered format recognises it."""
    for part in ("convert", "compat"):
        load_builtin(part)
    return next((known.convert(tree) for known in _formats if known.recognises(tree)), None)
