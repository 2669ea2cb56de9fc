"""Texts of docstrings for tables; units of numbers, from their descriptions."""

from __future__ import annotations

import inspect
import re
from typing import Any

_UNITS = (
    "epochs or iterations", "iterations or epochs", "micro-batches", "iterations", "epochs", "validations", "updates", "seconds",
    "bytes", "exit status", "events", "checkpoints", "files", "digits", "share", "norm", "the metric's unit", "epoch or iteration", "iteration",
    "epoch", "port", "learning rate", "factor",
)  # fmt: skip
_PACKAGES = re.compile(r"^trainbus\.(eventloop\.|hooks\.)?")
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc):`~?([^`]+)`")


def is_number(annotation: str) -> bool:
    """Return True for the type of a number, also one that may be None or something else."""
    return bool({"int", "float"} & set(re.sub(r"\[.*?\]", "", annotation).split(" | ")))


def unit(annotation: str, description: str) -> str:
    """Return the unit of a number: the first one that its description names; empty if the option is no number."""
    if not is_number(annotation):
        return ""
    lower = description.lower()
    places = [(lower.find(word), word) for word in dict.fromkeys(_UNITS) if word in lower]
    return min(places, key=lambda place: (place[0], -len(place[1])))[1] if places else ""


def summary(doc: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(doc or "").partition("\n\n")[0].split())


def as_markdown(text: str) -> str:
    """Return text of a docstring as Markdown for a table's cell: roles as code, no ``|`` that ends the cell."""
    return _ROLE.sub(lambda found: f"`{_PACKAGES.sub('', found[1])}`", text).replace("``", "`").replace("|", "\\|")


def shown(default: Any) -> str:
    """Return a default as code for a table's cell; a class by its name."""
    text = default.__name__ if isinstance(default, type) else re.sub(r"<([\w.]+): [^>]*>", r"\1", repr(default))  # enumerations
    return "`" + text.replace("|", "\\|") + "`"
