"""uvicorn: whether the server of this process shuts down.

uvicorn waits for open responses before it notifies the application: an open stream would block its shutdown for ever.
"""

from __future__ import annotations

import signal
import sys


def shuts_down() -> bool:
    """Return True if the uvicorn server that handles this process's signals is shutting down."""
    kind = getattr(sys.modules.get("uvicorn"), "Server", None)
    if kind is None:
        return False
    # Server.capture_signals: the handlers are methods of the server while it serves.
    servers = (getattr(signal.getsignal(number), "__self__", None) for number in (signal.SIGINT, signal.SIGTERM))
    return any(isinstance(one, kind) and one.should_exit for one in servers)
