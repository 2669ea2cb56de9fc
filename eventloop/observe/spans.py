"""``Recorder``: what took how long on which thread, recorded in 0.2 µs a span and read by another thread.

A span is a tuple of five integers: a running number, the id of its name, the thread, and its begin and end in nanoseconds of
``perf_counter_ns``. It is noted at its end, so a span within another one comes first. Routes write spans while ``bus.timing``
is on, one for the event and one for each handler; otherwise they have no trace of this.

The ring is bounded. A reader that is too slow loses the oldest spans; the running numbers tell how many.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from itertools import chain, count
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FIELDS: Final = 5
NUMBER, NAME, THREAD, BEGIN, END = range(FIELDS)
Spans = NDArray[np.int64]
"""Spans in rows, with the columns ``NUMBER, NAME, THREAD, BEGIN, END``."""

CAPACITY: Final = 1 << 17  # spans that wait for the reader: some 20 MB, and 0.3 s of 10 spans per 25 µs
_PERIOD: Final = 1.0  # seconds after which the reader takes what there is
_LOOK: Final = 0.1  # seconds between two looks at how much there is
_CHUNK: Final = 4096  # spans at once; for that long the reader holds the GIL (0.3 ms)


class Recorder:
    """Records spans from any thread, and passes them to readers on a thread of its own.

    Args:
        capacity: spans that the ring holds until they are read.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[tuple[int, ...]] = deque(maxlen=capacity)
        self._numbers = count()
        self._read = 0  # the number of the next span to read
        self._ids: dict[Hashable, int] = {}
        self._reading = threading.Lock()
        self._readers: tuple[Callable[[Spans], object], ...] = ()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Spans that were lost because they were not read in time."""
        # For routes, which call them without an attribute look-up.
        self.note = self._ring.append
        self.number: Callable[[], int] = self._numbers.__next__
        self.thread = threading.get_ident

    def id_of(self, name: Hashable) -> int:
        """Return the id for a name; equal names have one id."""
        return self._ids.setdefault(name, len(self._ids))

    @property
    def names(self) -> list[Any]:
        """The names by id."""
        return list(self._ids)

    def add_reader(self, read: Callable[[Spans], object]) -> None:
        """Call ``read`` with all spans from now on, in batches, from one thread at a time."""
        with self._reading:
            self._readers = (*self._readers, read)

    def remove_reader(self, read: Callable[[Spans], object]) -> None:
        """Call ``read`` no more."""
        with self._reading:
            self._readers = tuple(one for one in self._readers if one != read)

    def drain(self) -> None:
        """Pass on what was recorded so far."""
        with self._reading:
            while self._ring:
                taken = [self._ring.popleft() for _ in range(min(_CHUNK, len(self._ring)))]
                spans = np.fromiter(chain.from_iterable(taken), np.int64, FIELDS * len(taken)).reshape(-1, FIELDS)
                newest = int(spans[:, NUMBER].max()) + 1
                # Threads may append in another order than they took numbers, so a gap can close later.
                self.dropped += max(0, newest - self._read) - len(taken)
                self._read = max(self._read, newest)
                for read in self._readers:
                    read(spans)

    def start(self) -> None:
        """Drain regularly, on a daemon thread, until :meth:`stop`. Idempotent."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._drain_regularly, name="trainbus spans", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and drain a last time. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            if thread is not threading.current_thread():
                thread.join()
        self.drain()

    def _drain_regularly(self) -> None:
        waited = 0.0
        while not self._stopped.wait(_LOOK):
            waited += _LOOK
            # Rarely, because reading costs the training the GIL, and little more for many spans than for few.
            if waited >= _PERIOD or len(self._ring) > CAPACITY // 4:
                waited = 0.0
                self.drain()
                self.drained()

    def drained(self) -> None:
        """Called on the reading thread after it has passed on what there was; nothing by default."""
