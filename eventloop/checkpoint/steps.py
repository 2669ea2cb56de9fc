"""How far the writers of checkpoints in this process have come: tells a thread that waits for a slow save from one that hangs.

A step is a piece of a file that is written, a file that is synced, a part of an upload. It takes as long as its disk or store
does: the sync of a file that fits the memory is one step.
"""

from __future__ import annotations

import threading
from typing import Final

_waiting: Final[set[int]] = set()  # threads; each adds and removes only itself
_made = 0


def note_step() -> None:
    """Note that a writer has made a step."""
    global _made
    _made += 1  # of two threads one may overwrite the other's; it has changed nevertheless


def begin_wait() -> None:
    """Note that this thread waits for writers."""
    _waiting.add(threading.get_ident())


def end_wait() -> None:
    """Note that this thread no longer waits for writers."""
    _waiting.discard(threading.get_ident())


def steps_awaited(thread: int) -> int | None:
    """Return the steps that all writers have made so far, if a thread waits for one of them; None if it does not.

    Args:
        thread: ``threading.get_ident()`` of the thread.
    """
    return _made if thread in _waiting else None
