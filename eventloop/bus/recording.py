"""Who records what a bus does. The room that interprets the records stands above the bus, and registers its recorder here."""

from __future__ import annotations

from typing import Any

from trainbus.eventloop.builtin import load_builtin, load_object
from trainbus.eventloop.errors import ConfigurationError

_recorder = ""


def register_recorder(path: str) -> None:
    """Register ``module:attribute`` of the class that records for a bus; it is imported when the first bus measures."""
    global _recorder
    _recorder = path


def make_recorder(bus: Any) -> Any:
    """Return a new recorder for a bus; raise ConfigurationError if no part of this installation has one."""
    load_builtin("observe")
    if not _recorder:
        raise ConfigurationError("bus.timing needs a recorder, and trainbus.observe, which has one, is not installed here")
    return load_object(_recorder)(bus)
