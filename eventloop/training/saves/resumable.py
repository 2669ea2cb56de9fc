"""Tell how to continue a run that ended early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from eventloop.checkpoint import AnyPath, RemotePath

_way: ContextVar[str] = ContextVar("trainbus_way_to_resume", default="")


@contextmanager
def resumed_with(way: str) -> Iterator[None]:
    """Let runs in a ``with`` block tell that ``way``, such as a command's arguments, continues them."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def resume_line(path: AnyPath | None, way: str) -> str:
    """Return the line that tells to continue from the checkpoint ``path`` with ``way``; empty if it is None, or was removed."""
    if path is None or not (isinstance(path, RemotePath) or path.exists()):
        return ""
    return f"continue from {path} with {_way.get() or way}"
