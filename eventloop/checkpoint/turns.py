"""One save is written at a time: what becomes of the next one while it is."""

from __future__ import annotations

import threading
from typing import Final, Generic, Literal, TypeVar, get_args

from eventloop.errors import ConfigurationError

Busy = Literal["wait", "skip", "replace"]
BUSY: Final[tuple[str, ...]] = get_args(Busy)

_POLL: Final = 0.2
"""Seconds after which somebody who waits looks again, in case Ctrl-C swallowed a notice."""

Job = TypeVar("Job")


def check_busy(busy: object) -> None:
    """Raise ConfigurationError unless ``busy`` is a policy."""
    if busy not in BUSY:
        raise ConfigurationError(
            f'busy={busy!r}: while a save is being written, "wait" waits for it, "skip" leaves the new one out, and "replace" '
            "puts the new one in the place of the one that waits"
        )


class Turns(Generic[Job]):
    """Knows the jobs under way and the one that waits. Jobs come from one thread and are done by another.

    A job is entered, begun and ended, or it is entered and taken back before it has begun. Each of these is done in full or
    not at all when Ctrl-C strikes: CPython looks for signals only at calls and jumps back, and none is between the changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: tuple[Job, ...] = ()
        self._waiting: Job | None = None
        # Who waits for the end: one lock each, taken. An Event would lose track of its own lock when Ctrl-C strikes in it.
        self._bells: list[threading.Lock] = []

    @property
    def busy(self) -> bool:
        """True while a job is under way."""
        return bool(self._under_way)

    @property
    def waiting(self) -> Job | None:
        """The job that can be taken back, if there is one."""
        return self._waiting

    def wait(self) -> None:
        """Wait until no job is under way."""
        while True:
            with self._lock:
                if not self._under_way:
                    return
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            bell.acquire(timeout=_POLL)

    def enter(self, job: Job) -> None:
        """Note a job that can be taken back until it begins."""
        with self._lock:
            self._under_way = (*self._under_way, job)
            self._waiting = job

    def enter_for_good(self, job: Job) -> None:
        """Note a job that waits in vain for nobody: `begin` is not asked about it."""
        with self._lock:
            self._under_way = (*self._under_way, job)

    def take_back(self) -> Job | None:
        """Take the job back that waits, if one does: it will never begin."""
        with self._lock:
            job = self._waiting
            if job is not None:
                left = self._without(job)
                self._under_way = left
                self._waiting = None
                self._ring()
            return job

    def begin(self, job: Job) -> bool:
        """Begin a job; False if it was taken back."""
        with self._lock:
            if self._waiting is not job:
                return False
            self._waiting = None
            return True

    def begin_next(self) -> Job | None:
        """Begin the job that waits, if one does."""
        with self._lock:
            job = self._waiting
            self._waiting = None
            return job

    def end(self, job: Job) -> None:
        """Note that a job is done, well or not. One that is not under way is none."""
        with self._lock:
            left = self._without(job)
            self._under_way = left
            self._ring()

    def _without(self, job: Job) -> tuple[Job, ...]:
        return tuple(other for other in self._under_way if other is not job)

    def _ring(self) -> None:
        while self._bells and not self._under_way:
            self._bells.pop().release()
