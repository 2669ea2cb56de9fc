"""One save is written at a time: what becomes of the next one while it is."""

from __future__ import annotations

import threading
from typing import Final, Generic, Literal, TypeVar, get_args

from eventloop.errors import ConfigurationError

Busy = Literal["wait", "skip", "replace"]
BUSY: Final[tuple[str, ...]] = get_args(Busy)

Job = TypeVar("Job")


def check_busy(busy: object) -> None:
    """Raise ConfigurationError unless ``busy`` is a policy."""
    if busy not in BUSY:
        raise ConfigurationError(
            f'busy={busy!r}: while a save is being written, "wait" waits for it, "skip" leaves the new one out, and "replace" '
            "puts the new one in the place of the one that waits"
        )


class Turns(Generic[Job]):
    """Counts the jobs under way and knows the one that waits. Jobs come from one thread and are done by another.

    A job is entered, begun and ended, or it is entered and taken back before it has begun.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._waiting: Job | None = None
        self._idle = threading.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """True while a job is under way."""
        return not self._idle.is_set()

    def wait(self) -> None:
        """Wait until no job is under way."""
        self._idle.wait()

    def enter(self, job: Job) -> None:
        """Note a job that can be taken back until it begins."""
        with self._lock:
            self._under_way += 1
            self._waiting = job
            self._idle.clear()

    def enter_for_good(self) -> None:
        """Note a job that waits in vain for nobody: `begin` is not asked about it."""
        with self._lock:
            self._under_way += 1
            self._idle.clear()

    def take_back(self) -> Job | None:
        """Take the job back that waits, if one does: it will never begin."""
        with self._lock:
            job, self._waiting = self._waiting, None
            if job is not None:
                self._count_one_less()
            return job

    def begin(self, job: Job) -> bool:
        """Begin a job; False if it was taken back."""
        with self._lock:
            if self._waiting is not job:
                return False
            self._waiting = None
            return True

    def end(self) -> None:
        """Note that a job is done, well or not."""
        with self._lock:
            self._count_one_less()

    def _count_one_less(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()
