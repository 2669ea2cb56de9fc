"""``Recorder``: record timed pieces of work (spans) of any thread, read by another thread.

A span has the id of its name, the thread, and its begin and end in nanoseconds of ``perf_counter_ns``. It is recorded at its
end, so a nested span comes first. Routes record while ``bus.timing`` is on. While it is off, they contain no code for this.

A record consists of integers: a running number, an id, the thread, a begin, and ends. The record of a single span has one end.
The record of a publish, whose id is that of :class:`Steps`, has one end for each handler and the end of the whole. Each handler
begins where the previous one ended. A record for each handler would take half as long again in the cold caches after a step.

Records are packed in bytes, which the garbage collector does not count. As tuples they would make it run each 60 iterations:
with 12 spans in a cold cache, p99 of a publish is 24 µs instead of 43 µs, and the mean 6.9 µs instead of 11 µs.

The ring is bounded. A reader that is too slow loses the oldest records; gaps in the running numbers tell how many.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import cache, partial
from itertools import count
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainbus.eventloop.locks import is_held
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.seams import Seam
from trainbus.eventloop.user_errors import contextmanager

FIELDS: Final = 5
NUMBER, NAME, THREAD, BEGIN, END = range(FIELDS)
Spans = NDArray[np.int64]
"""Spans in rows, with the columns ``NUMBER, NAME, THREAD, BEGIN, END``."""

CAPACITY: Final = 1 << 16  # records that may wait for the reader: about 10 MB, or 1.6 s at one per 25 µs
PERIOD: Final = Seam(1.0)  # seconds after which the reader drains the ring
_LOOK: Final = 0.1  # seconds between two checks of the ring's length
_CHUNK: Final = 1024  # records taken at once, for which the reader holds the GIL (0.1 ms)
_BATCH: Final = 32  # chunks in one call of the readers
_BEFORE_ENDS: Final = END  # integers of a record before its ends

log = get_logger()


class Steps(NamedTuple):
    """The name of records of several spans: the ids of the steps, one after the other, and that of the whole.

    An end is 0 if the step did not happen, or the whole did not end, and negative if the step failed then: no span has it.
    """

    ids: tuple[int, ...]


@cache
def packer(steps: int) -> Callable[..., bytes]:
    """Return the function that packs the integers of records with this number of steps."""
    return Struct(f"{FIELDS + steps}q").pack


class Recorder:
    """Record spans from any thread, and pass them to readers on a separate thread.

    Args:
        capacity: number of records that the ring holds until they are read.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[bytes] = deque(maxlen=capacity)
        self._capacity = capacity
        self._numbers = count()
        self._read = 0  # the number of the next span to read
        self._ids: dict[Hashable, int] = {}
        self._firsts, self._span_ids = np.zeros((2, 0), np.int64)
        self._reading = threading.RLock()
        self._readers: tuple[Callable[[Spans], object], ...] = ()
        self._failed: set[object] = set()  # failures that were logged already
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Records that were lost because they were not read in time."""
        # For routes, which call them without an attribute look-up.
        self.note = self._ring.append
        self.number: Callable[[], int] = self._numbers.__next__
        self.thread = threading.get_ident
        self.clock = time.perf_counter_ns

    def id_of(self, name: Hashable) -> int:
        """Return the id for a name; equal names have one id."""
        return self._ids.setdefault(name, len(self._ids))

    @property
    def names(self) -> list[Any]:
        """The names by id."""
        return list(self._ids)

    def add(self, name: int, begin: int, end: int, thread: int | None = None) -> None:
        """Record a span by the id of its name; by default, of this thread."""
        self.note(_pack_span(self.number(), name, self.thread() if thread is None else thread, begin, end))

    def mark(self, name: int, _: object = None) -> None:
        """Record a moment: a span that ends where it begins."""
        now = self.clock()
        self.note(_pack_span(self.number(), name, self.thread(), now, now))

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
        if is_held(self._reading):
            return  # the handler of a signal, in the middle of this
        with self._reading:
            self._pass_on(yields=False)

    def start(self) -> None:
        """Drain regularly, on a daemon thread, until :meth:`stop`. Idempotent."""
        if self._thread is None and self._starting.acquire(blocking=False):  # else another thread starts it
            try:
                self._stopped = stopped = threading.Event()
                drain = partial(self._drain_regularly, stopped)
                thread = threading.Thread(target=drain, name="trainbus spans", daemon=True)
                thread.start()
                self._thread = thread  # after start(), so that stop() can wait for it; until then it only tells it to end
            finally:
                self._starting.release()

    def stop(self) -> None:
        """Stop the thread after a last drain. Idempotent. Waits for the thread: hold no lock that a reader takes."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.drain()

    def become_inert(self) -> None:
        """Forget spans, readers and thread in a forked child; a thread of the parent may have held the lock."""
        self._reading = threading.RLock()
        self._ring.clear()
        self._readers, self._thread = (), None

    def looked(self) -> None:
        """Called about once a second on the reading thread; does nothing by default. An error in it is logged once."""

    def _pass_on(self, *, yields: bool) -> None:
        """Pass the ring's spans to the readers. With ``yields``, let other threads run meanwhile. The caller holds the lock."""
        left = len(self._ring)  # without the spans that arrive meanwhile, so that the loop ends
        while left:
            records: list[bytes] = []
            for _ in range(_BATCH):
                records += [self._ring.popleft() for _ in range(min(_CHUNK, left))]
                left -= min(_CHUNK, left)
                if not left:
                    break
                if yields:
                    time.sleep(0)
            spans, newest = self._spans_of(records)
            # Threads may append in a different order than they took numbers, so a gap can close later.
            self.dropped += max(0, newest + 1 - self._read) - len(records)
            self._read = max(self._read, newest + 1)
            for read in self._readers:
                self._guard(read, spans)

    def _spans_of(self, records: list[bytes]) -> tuple[Spans, int]:
        """Return the spans of records, and the newest of their numbers."""
        flat = np.frombuffer(b"".join(records), np.int64)
        sizes = np.fromiter(map(len, records), np.int64, len(records)) // flat.itemsize
        starts = np.cumsum(sizes) - sizes
        each = sizes - _BEFORE_ENDS
        of = np.repeat(np.arange(len(records)), each)  # the record of each span
        index = np.arange(len(of)) - np.repeat(np.cumsum(each) - each, each)  # of the span in its record
        ends = starts[of] + _BEFORE_ENDS + index
        began = starts[of] + BEGIN
        before = np.where(index == each[of] - 1, began, ends - 1)
        while len(skipped := np.flatnonzero((flat[before] == 0) & (before > began))):
            before[skipped] -= 1
        first, ids = self._table()
        spans = np.empty((len(of), FIELDS), np.int64)
        spans[:, NUMBER], spans[:, THREAD] = flat[starts + NUMBER][of], flat[starts + THREAD][of]
        spans[:, NAME] = ids[first[flat[starts + NAME]][of] + index]
        spans[:, BEGIN], spans[:, END] = np.abs(flat[before]), flat[ends]
        return spans.compress(spans[:, END] > 0, axis=0), int(flat[starts + NUMBER].max())

    def _table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of spans by the ids of records: where those of each begin, and all of them."""
        if len(self._ids) != len(self._firsts):
            ids = [name.ids if isinstance(name, Steps) else (number,) for number, name in enumerate(self.names)]
            self._firsts = np.cumsum([0, *map(len, ids)])[:-1]
            self._span_ids = np.array([one for each in ids for one in each])
        return self._firsts, self._span_ids

    def _guard(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            if call not in self._failed:
                self._failed.add(call)
                log.exception(
                    "a reader of spans failed; training continues, but its costs or traces are incomplete",
                    id="span-reader-failed",
                )

    def _drain_regularly(self, stopped: threading.Event) -> None:
        waited = 0.0
        while not stopped.wait(_LOOK):
            waited += _LOOK
            # Rarely, because each read takes the GIL from the training, hardly longer for many spans than for few.
            if waited >= PERIOD.value or len(self._ring) > self._capacity // 4:
                waited = 0.0
                with self._reading:
                    self._pass_on(yields=True)
                self._guard(self.looked)


_pack_span: Final = packer(0)
