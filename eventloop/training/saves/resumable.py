"""Tell how to continue a run that ended early."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


def resume_line(path: AnyPath | None, searched: Collection[AnyPath]) -> str:
    """Return the line that tells how to continue from the checkpoint ``path``; empty if it is None, or was removed.

    Args:
        path: the newest checkpoint of the run.
        searched: the directories that ``resume="auto"`` searches; empty if the run has no work dir.
    """
    if path is None or not (isinstance(path, RemotePath) or path.exists()):
        return ""
    way = _way.get() or ('resume="auto"' if path.parent in searched else f'resume="{path}"')
    return f"continue from {path} with {way}"
