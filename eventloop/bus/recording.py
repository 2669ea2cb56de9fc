"""Who records what a bus does. The room that interprets the records stands above the bus, and registers its recorder here."""

from __future__ import annotations

from typing import Any

from trainbus.eventloop.builtin import load_builtin, load_object

_recorder = ""


def register_recorder(path: str) -> None:
    """Register ``module:attribute`` of the class that records for a bus; it is imported when the first bus measures."""
    global _recorder
    _recorder = path


def make_recorder(bus: Any) -> Any:
    """Return a new recorder for a bus."""
    load_builtin("observe")
    return load_object(_recorder)(bus)
