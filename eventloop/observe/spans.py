"""``Recorder``: record timed pieces of work (spans) of any thread in 0.2 µs each, read by another thread.

A span is five integers: a running number, the id of its name, the thread, and its begin and end in nanoseconds of
``perf_counter_ns``. It is recorded at its end, so a nested span comes first. While ``bus.timing`` is on, routes record a span
for each event and one for each handler. While it is off, routes contain no code for this.

Spans are packed in bytes, which the garbage collector does not count. As tuples they would make it run each 60 iterations:
with 12 spans in a cold cache, p99 of a publish is 24 µs instead of 43 µs, and the mean 6.9 µs instead of 11 µs.

The ring is bounded. A reader that is too slow loses the oldest spans; gaps in the running numbers tell how many.
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

CAPACITY: Final = 1 << 17  # spans that may wait for the reader: about 12 MB, or 0.3 s at 10 spans per 25 µs
_PERIOD: Final = 1.0  # seconds after which the reader drains the ring
_LOOK: Final = 0.1  # seconds between two checks of the ring's length
_CHUNK: Final = 1024  # spans decoded at once, for which the reader holds the GIL (0.2 ms)
_BATCH: Final = 32  # chunks in one call of the readers

log = get_logger()


class Recorder:
    """Record spans from any thread, and pass them to readers on a separate thread.

    Args:
        capacity: number of spans that the ring holds until they are read.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[bytes] = deque(maxlen=capacity)
        self._capacity = capacity
        self._numbers = count()
        self._read = 0  # the number of the next span to read
        self._ids: dict[Hashable, int] = {}
        self._reading = threading.Lock()
        self._readers: tuple[Callable[[Spans], object], ...] = ()
        self._failed: set[object] = set()  # failures that were logged already
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
        """Record a span by the id of its name; by default, of this thread."""
        self.note(self.pack(self.number(), name, self.thread() if thread is None else thread, begin, end))

    @contextmanager
    def span(self, name: Hashable) -> Iterator[None]:
        """Record a ``with`` block as a span."""
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
        """Stop calling ``read``."""
        with self._reading:
            self._readers = tuple(one for one in self._readers if one != read)

    def drain(self) -> None:
        """Pass the spans recorded so far to the readers."""
        with self._reading:
            self._pass_on(yields=False)

    def start(self) -> None:
        """Drain regularly, on a daemon thread, until :meth:`stop`. Idempotent."""
        if self._thread is None:
            self._stopped = stopped = threading.Event()
            self._thread = threading.Thread(target=self._drain_regularly, args=(stopped,), name="trainbus spans", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread after a last drain. Idempotent. Waits for the thread: hold no lock that a reader takes."""
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
        """Pass the ring's spans to the readers. With ``yields``, let other threads run meanwhile. The caller holds the lock."""
        left = len(self._ring)  # without the spans that arrive meanwhile, so that the loop ends
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
            # Threads may append in a different order than they took numbers, so a gap can close later.
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
                log.exception("a reader of spans failed; training continues, but its costs or traces are incomplete")

    def _drain_regularly(self, stopped: threading.Event) -> None:
        waited = 0.0
        while not stopped.wait(_LOOK):
            waited += _LOOK
            # Rarely, because each read takes the GIL from the training, hardly longer for many spans than for few.
            if waited >= _PERIOD or len(self._ring) > self._capacity // 4:
                waited = 0.0
                with self._reading:
                    self._pass_on(yields=True)
                self._guard(self.looked)
