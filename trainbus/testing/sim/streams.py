"""Streams of the simulated device, whose work runs late: when the host waits for it, in the worst order that is allowed.

Nothing here depends on time. Work is queued, and runs on the thread that waits for it. ``ORDERS`` says what runs then.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Literal, NamedTuple, Self
from weakref import WeakValueDictionary

import torch

from trainbus.eventloop.user_errors import contextmanager
from trainbus.testing.sim.memory import HOST, Block, lock, reclaim
from trainbus.testing.sim.privates import DeviceType

Order = Literal["eager", "needed", "rivals"]
ORDERS: tuple[Order, ...] = ("eager", "needed", "rivals")
"""What runs when the host waits for work of a stream.

- ``eager``: all work has run when it was queued, as on a device that is faster than the host.
- ``needed``: only what that stream needs, as if all others were slow: what it should have waited for has not happened.
- ``rivals``: first all that other streams may do, as if that stream were slow: what should have waited for it has happened.
"""

DEVICES = 2
TYPE = int(DeviceType.PrivateUse1)


class HostWait(AssertionError):  # noqa: N818 - it says what happened
    """A thread waited for the device where it must not."""


class _Work(NamedTuple):
    run: Callable[[], Any] | None
    after: tuple[Stream, int] | None  # runs when that stream has done so many pieces of work


class Stream(torch.Stream):
    """A queue of work, with the methods of ``torch.cuda.Stream``."""

    work: deque[_Work]
    queued: int
    done: int

    def __new__(cls, device: Any = None, priority: int = 0) -> Self:
        index = index_of(device)
        made = super().__new__(cls, stream_id=next(_ids), device_index=index, device_type=TYPE)
        made.work, made.queued, made.done = deque(), 0, 0
        _all[made.stream_id] = made
        return made

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def __hash__(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return self is other

    def push(self, run: Callable[[], Any] | None, after: tuple[Stream, int] | None = None) -> None:
        with lock:
            _take_back()
            self._push(run, after)

    def _push(self, run: Callable[[], Any] | None, after: tuple[Stream, int] | None = None) -> None:
        self.work.append(_Work(run, after))
        self.queued += 1
        _busy[self] = None

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.at is not None:
            self.push(None, event.at)

    def wait_stream(self, stream: Stream) -> None:
        self.push(None, (stream, stream.queued))

    def query(self) -> bool:
        return _poll(self, self.queued)

    def synchronize(self) -> None:
        wait("stream.synchronize", self)


class Event:
    """A moment of a stream, with the methods of ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with lock:
            _take_back()
            self.at = stream, stream.queued

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.at is None or _poll(*self.at)

    def synchronize(self) -> None:
        wait("event.synchronize", *(self.at or (default_stream(), 0)))


_ids = count()
_all: WeakValueDictionary[int, Stream] = WeakValueDictionary()
_busy: dict[Stream, None] = {}
_freed: list[tuple[Block, list[tuple[Stream, int]]]] = []
_defaults: list[Stream] = []
_local = threading.local()
_order: Order = "needed"
waits: list[tuple[int, str]] = []
"""Each wait of the host for the device: the thread's number, and what waited."""
_trapped: Counter[int] = Counter()


def find(stream_id: int) -> Stream:
    return _all[stream_id]


def index_of(device: Any) -> int:
    """Return the index of a device; the current one's if it has none."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return getattr(_local, "device", 0)


def set_device(device: Any) -> None:
    index = index_of(device)
    if not 0 <= index < DEVICES:
        raise RuntimeError(f"device {index}: there are {DEVICES}")
    _local.device = index


@contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def default_stream(device: Any = None) -> Stream:
    return _defaults[index_of(device)]


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return getattr(_local, "streams", {}).get(index) or _defaults[index]


def set_stream(stream: Stream) -> None:
    _local.streams = {**getattr(_local, "streams", {}), stream.device.index: stream}


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    index, before = current_device(), current_stream(stream.device)
    set_stream(stream)
    set_device(stream.device)
    try:
        yield
    finally:
        set_stream(before)
        set_device(index)


def synchronize(device: Any = None) -> None:
    index = index_of(device)
    wait("synchronize", _defaults[index])
    with lock:
        for one in [*_busy]:
            if one.device.index == index:
                _run_to(one, one.queued)


def launch(stream: Stream, run: Callable[[], Any]) -> None:
    """Queue a kernel."""
    stream.push(run)
    if _order == "eager":
        with lock:
            _run_rivals(None)


def wait(what: str, stream: Stream, position: int | None = None) -> None:
    """Wait on this thread until ``stream`` has done its first ``position`` pieces of work, all by default."""
    position = stream.queued if position is None else position
    me = threading.get_ident()
    if _trapped[me]:
        raise HostWait(f"{what} on {threading.current_thread().name}")
    waits.append((me, what))
    with lock:
        _take_back()
        if stream.done < position and _order == "rivals":
            _run_rivals(stream)
        _run_to(stream, position)


@contextmanager
def no_waits() -> Iterator[None]:
    """A wait of this thread for the device raises HostWait."""
    me = threading.get_ident()
    _trapped[me] += 1
    try:
        yield
    finally:
        _trapped[me] -= 1


def _take_back() -> None:
    """Take memory back that torch has freed, as torch's caching allocators do.

    The next owner's first kernel is queued on the stream that allocated it. Work of other streams that was queued by now comes
    first only if they were recorded. Pinned memory has no stream; copies record theirs.
    """
    for block in reclaim():
        entry = block, [(one, one.queued) for one in block.users]
        if block.kind == HOST:
            _freed.append(entry)
        else:
            block.home._push(lambda entry=entry: _freed.append(entry))


def _poll(stream: Stream, position: int) -> bool:
    """Return whether so much work is done; if not, it will be at the next call, since time passes."""
    if stream.done >= position:
        return True
    with lock:
        _run_to(stream, position)
    return False


def _run_to(stream: Stream, position: int) -> None:
    while stream.done < position:
        if (after := stream.work[0].after) is not None:
            _run_to(*after)
        _run_one(stream)


def _run_rivals(target: Stream | None) -> None:
    """Run all that can run without ``target``."""
    ran = True
    while ran:
        ran = False
        for one in [*_busy]:
            while one is not target and one.work and _may_run(one.work[0]):
                _run_one(one)
                ran = True


def _may_run(work: _Work) -> bool:
    return work.after is None or work.after[0].done >= work.after[1]


def _run_one(stream: Stream) -> None:
    run = stream.work[0].run
    try:
        if run is not None:
            run()
    finally:
        stream.work.popleft()
        stream.done += 1
        if not stream.work:
            del _busy[stream]
    if _freed:
        for entry in [*_freed]:
            block, users = entry
            if all(one.done >= position for one, position in users):
                _freed.remove(entry)
                block.poison()


def reset(order: Order) -> None:
    """Finish all work, forget the waits, and set how the next work runs."""
    global _order
    with lock:
        _take_back()
        _run_rivals(None)
    _order = order
    waits.clear()
    _trapped.clear()
    _local.__dict__.clear()


_defaults += [Stream(index) for index in range(DEVICES)]
