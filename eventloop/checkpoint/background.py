"""The background writer: saves in order on one thread, of which the last one can be replaced until it begins."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, Literal, TypeVar

from trainbus.eventloop.checkpoint.commit import steps_made
from trainbus.eventloop.user_errors import contextmanager

_POLL: Final = 0.2
"""Seconds after which a waiting thread checks again, in case Ctrl-C swallowed a notification."""

Busy = Literal["wait", "skip", "replace"]
"""The behaviour of a save that is due while another is being written."""

Job = TypeVar("Job")

_waiting: Final[set[int]] = set()  # the threads that wait for writers; each adds and removes only itself


def steps_awaited(thread: int) -> int | None:
    """Return the steps that writers in this process have made, if a thread waits for one; None if it does not.

    While the number grows, the thread waits for a slow save and does not hang. A step takes as long as its disk or store takes:
    the sync of a file that fits the memory is one.

    Args:
        thread: its ``threading.get_ident()``.
    """
    return steps_made() if thread in _waiting else None


@contextmanager
def awaiting_steps() -> Iterator[None]:
    """Note that this thread waits for a writer; see :func:`steps_awaited`."""
    thread = threading.get_ident()
    try:
        _waiting.add(thread)
        yield
    finally:
        _waiting.discard(thread)


class PendingSaves(Generic[Job]):
    """Tracks the jobs under way and the one that waits. Jobs come from one thread and are done by another, in order.

    A job is entered, begun and ended, or it is entered and dropped before it has begun. Each of these is one assignment, so
    that Ctrl-C does not leave half of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: tuple[tuple[Job, ...], Job | None] = (), None
        self._held = False
        # One taken lock for each thread in ``wait``. An Event would lose track of its own lock when Ctrl-C strikes in it: it
        # enters the lock in Python code (see python/cpython#74174).
        self._bells: list[threading.Lock] = []

    @property
    def under_way(self) -> tuple[Job, ...]:
        """The jobs that were entered and have not ended."""
        return self._jobs[0]

    @property
    def waiting(self) -> Job | None:
        """The job that can be dropped."""
        return self._jobs[1]

    def wait(self, *, for_slot: bool = False, seconds: float = math.inf) -> bool:
        """Wait until no job is under way; ``for_slot``: until none waits to begin. Return False after ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                if not self.under_way or (for_slot and self.waiting is None):
                    return True
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            if (left := end - time.monotonic()) <= 0:
                return False
            bell.acquire(timeout=min(_POLL, left))

    def enter(self, job: Job, *, can_wait: bool = True) -> None:
        """Note a job. Unless it ``can_wait``, it cannot be dropped."""
        with self._lock:
            self._jobs = (*self.under_way, job), job if can_wait else self.waiting

    def hold(self) -> Job | None:
        """Return the waiting job, if there is one, and keep it from beginning until :meth:`let_go`."""
        with self._lock:
            self._held = True
            return self.waiting

    def let_go(self) -> None:
        """Let the job that is held begin."""
        self._held = False

    def drop(self, drops: Callable[[Job], bool] = lambda job: True) -> tuple[Job, ...]:
        """Drop the waiting job, and those entered after it, as far as ``drops`` says so: they will never begin."""
        with self._lock:
            first = next((at for at, job in enumerate(self.under_way) if job is self.waiting), len(self.under_way))
            dropped = tuple(job for job in self.under_way[first:] if drops(job))
            self._keep(tuple(job for job in self.under_way if not any(job is one for one in dropped)))
            return dropped

    def begin(self) -> Job | None:
        """Begin the first job and return it; None if there is none, or if it is held."""
        with self._lock:
            if not self.under_way:
                return None
            job = self.under_way[0]
            if self._held and self.waiting is job:
                return None
            if self.waiting is job:
                self._jobs = self.under_way, None
                self._ring()
            return job

    def end(self, job: Job) -> None:
        """Note that a job is done, well or not. A job that is not under way is ignored."""
        with self._lock:
            self._keep(tuple(other for other in self.under_way if other is not job))

    def _keep(self, left: tuple[Job, ...]) -> None:
        self._jobs = left, self.waiting if any(job is self.waiting for job in left) else None
        if not left:
            self._ring()

    def _ring(self) -> None:
        while self._bells:
            self._bells.pop().release()


class BackgroundWriter(PendingSaves[Job]):
    """Pending saves with a thread that does them. One thread at a time may use it; in a forked process it has no thread.

    Args:
        write: does a job; called on the thread, and must not raise.
        at_exit: called at interpreter exit, unless it was closed.
    """

    def __init__(self, write: Callable[[Job], object], *, at_exit: Callable[[], object]) -> None:
        super().__init__()
        self._write = write
        self._at_exit = at_exit
        # Wakes the thread; in C, so that Ctrl-C cannot corrupt it: handlers of signals run between two instructions of Python
        # (https://docs.python.org/3/library/signal.html#execution-of-python-signal-handlers).
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._write_all, name="trainbus-saver", daemon=True)
        try:
            self._thread.start()
            atexit.register(self._at_exit)
        except BaseException:
            self.closed = True
            self._bell.put(None)  # after Ctrl-C the thread may run nevertheless, and must end
            raise

    @property
    def here(self) -> bool:
        """True in the process that created it."""
        return self._process == os.getpid()

    @property
    def busy(self) -> bool:
        """True while a job is under way."""
        self._wake()
        return bool(self.under_way)

    def make_way(
        self, busy: Busy | Literal["queue"], give_up: Callable[[Job], bool], agree: Callable[[bool], bool] = bool
    ) -> Job | None:
        """Make way for another job, as ``busy`` says; return the job that it replaces, if any.

        Args:
            busy: ``"wait"`` waits for the jobs that are under way, ``"queue"`` only if another one waits already. ``"replace"``
                replaces the one that waits. ``"skip"`` does nothing: ask :attr:`busy` first.
            give_up: marks a job, for those who wait for it and for ``write``, and returns False if it cannot be given up.
            agree: called with whether there is a job to replace; returns whether it is replaced.
        """
        if busy in ("wait", "queue"):
            self.wait(for_slot=busy == "queue")
        elif busy == "replace":
            try:
                waiting = self.hold()
                # Marked before it is dropped: after Ctrl-C between the two, the thread finds it, with nothing to do.
                if agree(waiting is not None) and waiting is not None and give_up(waiting):
                    self.drop(lambda job: job is waiting)
                    return waiting
            finally:
                self._wake()
        return None

    def has(self, job: Job) -> bool:
        """Return True if a job is under way."""
        return any(other is job for other in self.under_way)

    def enter(self, job: Job, *, can_wait: bool = True) -> None:
        """Queue a job. Unless it ``can_wait``, it cannot be dropped."""
        super().enter(job, can_wait=can_wait)  # from here on it is done or dropped, even after Ctrl-C
        self._wake()

    def wait(self, *, for_slot: bool = False, seconds: float = math.inf) -> bool:
        """Wait until no job is under way; ``for_slot``: until none waits to begin. Return False after ``seconds``."""
        self._wake()
        if not self.here or threading.current_thread() is self._thread:  # which would wait for itself
            return True
        thread = threading.get_ident()  # as awaiting_steps() does, with fewer calls beside the training
        try:
            _waiting.add(thread)
            return super().wait(for_slot=for_slot, seconds=seconds)
        finally:
            _waiting.discard(thread)

    def close(self, seconds: float = math.inf) -> bool:
        """Do the jobs that wait, and end the thread; return False after ``seconds``. After Ctrl-C, call it again to finish."""
        self.closed = True
        done = self.wait(seconds=seconds)
        if self.here and done:
            self._thread.join()  # all is done, should Ctrl-C have it return too soon (python/cpython#90882)
        atexit.unregister(self._at_exit)
        return done

    def _wake(self) -> None:
        """Have the thread look for jobs. Each call does so: Ctrl-C may have struck between entering or holding one and this."""
        self.let_go()
        self._bell.put(None)

    def _write_all(self) -> None:
        while True:
            self._bell.get()
            closed = self.closed  # asked first: every job comes before it, so the last one is found below
            while (job := self.begin()) is not None:
                try:
                    self._write(job)
                finally:
                    self.end(job)
            if closed:
                return
