"""What offloaded handlers have left behind to be raised, and the threads on which that is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Failures:
    """Errors that nobody has heard of yet, the first of each handler. Changed under the lock of its bus."""

    def __init__(self) -> None:
        self._left: dict[object, BaseException] = {}
        self._training: tuple[_Training, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, source: object, error: BaseException) -> None:
        """Keep an error. Of several by one source the first: a handler that always fails would pile them up."""
        self._left.setdefault(source, error)

    def take(self) -> list[BaseException]:
        """Return what is left, and leave nothing."""
        left, self._left = list(self._left.values()), {}
        return left

    def adopt(self, interrupt: Callable[[], object], forked: Callable[[Callable[[], object]], object]) -> None:
        """Make this thread one of those that errors are raised on."""
        self._training = (*self._training, _Training(threading.get_ident(), interrupt, forked))

    def release(self, interrupt: Callable[[], object]) -> None:
        """Undo :meth:`adopt` with the same ``interrupt``."""
        self._training = tuple(one for one in self._training if one.interrupt != interrupt)

    def here(self, *, otherwise: bool) -> bool:
        """Return True if this is a thread to raise on; where none was adopted, ``otherwise``."""
        if not self._training:
            return otherwise
        here = threading.get_ident()
        return any(one.ident == here for one in self._training)

    def interrupt(self) -> None:
        """Call the ``interrupt`` that this thread was adopted with, if it was."""
        for one in self._training:
            if one.ident == threading.get_ident():
                one.interrupt()

    def forked(self, refuse: Callable[[], object]) -> None:
        """Tell the runs, in a forked child: ``refuse`` raises an error that says why they cannot go on."""
        for one in self._training:
            one.forked(refuse)


class _Training(NamedTuple):
    """A thread with an open run."""

    ident: int
    interrupt: Callable[[], object]
    forked: Callable[[Callable[[], object]], object]


def raise_all(failures: list[BaseException]) -> None:
    """Raise one error as it is, several as a group, and of none nothing."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup("several offloaded handlers failed", failures)
