"""Web servers of this process, which wait for open streams before they end."""

from __future__ import annotations

from collections.abc import Callable

_ends: list[Callable[[], bool]] = []


def register_server(ends: Callable[[], bool]) -> None:
    """Register a web server's library; ``ends`` returns True while such a server of this process shuts down."""
    _ends.append(ends)


def server_ends() -> bool:
    """Return True if a web server of this process is shutting down: the streams that it keeps open should end."""
    return any(one() for one in _ends)
