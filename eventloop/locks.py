"""The locks of buses and lanes, which no code may hold while it waits; see ``docs/internals/locks.md``.

``TRAINBUS_CHECK_LOCKS=1`` makes each wait of the package check that its thread holds none of them. Tests turn it on.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Final

from trainbus.eventloop.privates import is_owned
from trainbus.eventloop.seams import Seam

CHECKED: Final = Seam(bool(os.environ.get("TRAINBUS_CHECK_LOCKS")))
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class WaitWithLockError(AssertionError):
    """Code waits for another thread or an event loop while its thread holds a lock, which the other may need."""


def new_lock() -> threading.RLock:
    """Return a lock that is not to be held where code waits.

    It is re-entrant: a signal handler, or a finalizer that the garbage collector calls, may use the bus while its thread holds
    the lock.
    """
    lock = threading.RLock()
    if CHECKED.value:
        _locks.add(lock)
    return lock


def is_held(lock: threading.RLock) -> bool:
    """Return True if this thread holds ``lock``."""
    return is_owned(lock)


def may_wait(what: str) -> None:
    """Check, if the switch is on, that this thread holds no lock; called before each wait.

    Raises:
        WaitWithLockError: it holds one.
    """
    if CHECKED.value and any(map(is_held, list(_locks))):
        raise WaitWithLockError(f"waiting for {what}, this thread holds the lock of a bus or a lane: docs/internals/locks.md")
