"""``Recorder``: what took how long on which thread, recorded in 0.2 µs a span and read by another thread.

A span is five integers: a running number, the id of its name, the thread, and its begin and end in nanoseconds of
``perf_counter_ns``. It is noted at its end, so a span within another one comes first. Routes write spans while ``bus.timing``
is on, one for the event and one for each handler; otherwise they have no trace of this.

Spans are packed in bytes, which the garbage collector does not count. As tuples they would make it run each 60 iterations:
with 12 spans in a cold cache, p99 of a publish is 24 µs instead of 43 µs, and the mean 6.9 µs instead of 11 µs.

The ring is bounded. A reader that is too slow loses the oldest spans; the running numbers tell how many.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import count
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from eventloop.log import get_logger

FIELDS: Final = 5
NUMBER, NAME, THREAD, BEGIN, END = range(FIELDS)
Spans = NDArray[np.int64]
"""Spans in rows, with the columns ``NUMBER, NAME, THREAD, BEGIN, END``."""

CAPACITY: Final = 1 << 17  # spans that wait for the reader: some 12 MB, and 0.3 s of 10 spans per 25 µs
_PERIOD: Final = 1.0  # seconds after which the reader takes what there is
_LOOK: Final = 0.1  # seconds between two looks at how much there is
_CHUNK: Final = 1024  # spans at once; for that long the reader holds the GIL (0.2 ms)
_BATCH: Final = 32  # chunks that readers get at once

log = get_logger()


class Recorder:
    """Records spans from any thread, and passes them to readers on a thread of its own.

    Args:
        capacity: spans that the ring holds until they are read.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[bytes] = deque(maxlen=capacity)
        self._capacity = capacity
        self._numbers = count()
        self._read = 0  # the number of the next span to read
        self._ids: dict[Hashable, int] = {}
        self._reading = threading.Lock()
        self._readers: tuple[Callable[[Spans], object], ...] = ()
        self._failed: set[object] = set()  # what has failed, and was logged
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Spans that were lost because they were not read in time."""
        # For routes, which call them without an attribute look-up.
        self.note = self._ring.append
        self.pack = Struct(f"{FIELDS}q").pack
        self.number: Callable[[], int] = self._numbers.__next__
        self.thread = threading.get_ident

    def id_of(self, name: Hashable) -> int:
        """Return the id for a name; equal names have one id."""
        return self._ids.setdefault(name, len(self._ids))

    @property
    def names(self) -> list[Any]:
        """The names by id."""
        return list(self._ids)

    def add(self, name: int, begin: int, end: int, thread: int | None = None) -> None:
        """Record a span, by the id of its name; of this thread if none is given."""
        self.note(self.pack(self.number(), name, self.thread() if thread is None else thread, begin, end))

    @contextmanager
    def span(self, name: Hashable) -> Iterator[None]:
        """Record a block as a span."""
        number, begin = self.id_of(name), time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(number, begin, time.perf_counter_ns())

    def add_reader(self, read: Callable[[Spans], object]) -> None:
        """Call ``read`` with all spans from now on, in batches, from one thread at a time. An error in it is logged once."""
        with self._reading:
            self._readers = (*self._readers, read)

    def remove_reader(self, read: Callable[[Spans], object]) -> None:
        """Call ``read`` no more."""
        with self._reading:
            self._readers = tuple(one for one in self._readers if one != read)

    def drain(self) -> None:
        """Pass on what was recorded so far."""
        with self._reading:
            self._pass_on(yields=False)

    def start(self) -> None:
        """Drain regularly, on a daemon thread, until :meth:`stop`. Idempotent."""
        if self._thread is None:
            self._stopped = stopped = threading.Event()
            self._thread = threading.Thread(target=self._drain_regularly, args=(stopped,), name="trainbus spans", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and drain a last time. Idempotent. Hold no lock that a reader may want: it waits for the thread."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.drain()

    def become_inert(self) -> None:
        """Forget spans, readers and thread in a forked child; a thread of the parent may have held the lock."""
        self._reading = threading.Lock()
        self._ring.clear()
        self._readers, self._thread = (), None

    def looked(self) -> None:
        """Called about once a second on the reading thread; does nothing by default. An error in it is logged once."""

    def _pass_on(self, *, yields: bool) -> None:
        """Pass on what is in the ring; ``yields``: let other threads run in between. Called with the lock held."""
        left = len(self._ring)  # not what comes meanwhile, so that this ends
        while left:
            chunks: list[Spans] = []
            while left and len(chunks) < _BATCH:
                taken = [self._ring.popleft() for _ in range(min(_CHUNK, left))]
                chunks.append(np.frombuffer(b"".join(taken), np.int64))
                left -= len(taken)
                if yields:
                    time.sleep(0)
            spans = np.concatenate(chunks).reshape(-1, FIELDS)
            newest = int(spans[:, NUMBER].max()) + 1
            # Threads may append in another order than they took numbers, so a gap can close later.
            self.dropped += max(0, newest - self._read) - len(spans)
            self._read = max(self._read, newest)
            for read in self._readers:
                self._guard(read, spans)

    def _guard(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            if call not in self._failed:
                self._failed.add(call)
                log.exception("a reader of spans failed; training goes on, but what it makes of them is incomplete")

    def _drain_regularly(self, stopped: threading.Event) -> None:
        waited = 0.0
        while not stopped.wait(_LOOK):
            waited += _LOOK
            # Rarely, because reading costs the training the GIL, and little more for many spans than for few.
            if waited >= _PERIOD or len(self._ring) > self._capacity // 4:
                waited = 0.0
                with self._reading:
                    self._pass_on(yields=True)
                self._guard(self.looked)
