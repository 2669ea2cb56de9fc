"""One subscription: its options, checked when it is made, and its side of dispatch."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypedDict, cast

import msgspec

from eventloop.detach import detacher, is_plain
from eventloop.errors import HandlerTimeoutError, SubscribeError, WorkerDiedError
from eventloop.events import Event, name_of
from eventloop.filters import FILTERS, Filter, make_filter
from eventloop.hook import Hook
from eventloop.log import get_logger
from eventloop.offload.lane import FULL, Full, Lane, LaneStats
from eventloop.offload.process import ProcessWorker
from eventloop.offload.runtime import Runtime
from eventloop.offload.sized import SizedLane
from eventloop.offload.target import target_of
from eventloop.offload.worker import MakeThread, ThreadWorker, Worker
from eventloop.priority import Priority, PriorityLike
from eventloop.staged import check_capture

Mode = Literal["inline", "async", "thread", "process", "stream"]

_MOST_TIMEOUTS = 3  # handlers that hang in threads left behind, or worker processes that do not start, before it is retired

log = get_logger()


class Owner(Protocol):
    """What a subscription needs to know of its bus."""

    def annotate(self, error: BaseException, subscription: Any, event: Event) -> None:
        """Add a note to ``error`` that says whose it is, where and when."""

    def fail(self, subscription: Any, error: BaseException) -> None:
        """Have ``error`` raised on the training thread."""

    def remove(self, *subscriptions: Any) -> None:
        """Let go of subscriptions."""


class Options(TypedDict, total=False):
    """Keyword options of ``bus.on`` and ``@mount``, which also take ``capture`` and ``batch`` (see ``Bus.on``).

    ``every``, ``once``, ``after``, ``before``, ``when``, ``every_seconds``: filters, see :mod:`eventloop.filters`.
    ``offload``: ``"thread"`` for a blocking handler, ``"process"`` for one that computes in Python (a function at the top level
    of a module, called in a worker process); ``"inline"`` says out loud what a plain function does anyway.
    ``queue``, ``full``, ``linger``: the lane of an offloaded handler: its places (1024), what happens when they are
    taken (``"block"``, ``"drop_old"``, ``"drop_new"``, ``"latest"``, ``"raise"``), seconds between looks (0.01).
    ``max_bytes``: with ``capture``, bytes of tensors that may wait or be in the handler's hands; ``full`` applies to them, too.
    ``timeout``: seconds after which a call of an offloaded handler has failed: async it is cancelled, in a thread left behind
    (three times, then the handler is retired), in a process killed with its worker, which is replaced.
    ``on_error``: ``"raise"`` or ``"log"``. ``disable_after``: retire the handler after so many errors (implies "log").
    """

    priority: PriorityLike
    every: int
    once: int | Iterable[int]
    after: int
    before: int
    when: Callable[[Any], object]
    every_seconds: float
    offload: Literal["inline", "thread", "process"]
    queue: int
    full: Full
    linger: float
    max_bytes: int
    timeout: float
    on_error: Literal["raise", "log"]
    disable_after: int


class StreamOptions(TypedDict, total=False):
    """Keyword options of ``bus.stream``, which also takes ``capture``: filters and the lane, as in :class:`Options`."""

    priority: PriorityLike
    every: int
    once: int | Iterable[int]
    after: int
    before: int
    when: Callable[[Any], object]
    every_seconds: float
    queue: int
    max_bytes: int
    full: Full
    linger: float


class Stats(msgspec.Struct, frozen=True):
    """What happened to one subscription so far.

    ``published == delivered + failed + dropped + pending`` at every moment. Offloaded ones count always; inline ones count
    isolated errors always and what they delivered only while ``bus.timing`` is on, because counting costs as much as a call.
    ``bytes`` is the size of the captured tensors that are pending; ``calls`` and ``seconds`` are counted while ``bus.timing``
    is on (of an offloaded one, the hand-off on the publisher).
    """

    published: int = 0
    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0
    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0


class Subscription:
    """The handle that ``bus.on(event, handler)`` returns. ``cancel()`` it, or use it as a context manager.

    An offloaded handler still gets what was published before the cancel.
    """

    def __init__(
        self,
        bus: Owner,
        event: type[Event] | tuple[type[Event], ...],
        handler: Callable[..., Any],
        *,
        hook: Hook | None = None,
        priority: PriorityLike = Priority.NORMAL,
        offload: str | None = None,
        capture: Callable[[Any], Any] | None = None,
        queue: int | None = None,
        full: Full | None = None,
        linger: float | None = None,
        max_bytes: int | None = None,
        timeout: float | None = None,
        batch: int | None = None,
        on_error: Literal["raise", "log"] | None = None,
        disable_after: int | None = None,
        **filters: Any,
    ) -> None:
        events = event if isinstance(event, tuple) else (event,)
        self.mount_points = tuple(map(name_of, events))
        self.mount_point = ", ".join(self.mount_points)
        self.handler = handler
        self.hook = hook
        self.label = _label(handler, hook)
        self.location = _location(handler)
        with _naming(self):
            if not callable(handler):
                raise SubscribeError("a handler is a function (or an object with __call__) that takes the event")
            _check_options(filters)
            self.priority = Priority.parse(priority)
            self.filter: Filter | None = make_filter(**filters)
            if self.filter is not None and self.filter.counted:
                for one in events:
                    _check_counts(one)
            self.mode: Mode = _mode(handler, offload)
            _check_arity(handler, batched=batch is not None)
            self._check_errors(on_error, disable_after)
            self._target = target_of(handler) if self.mode == "process" else None
            lane = {
                "capture": capture,
                "queue": queue,
                "full": full,
                "linger": linger,
                "max_bytes": max_bytes,
                "timeout": timeout,
                "batch": batch,
            }
            self.lane = self._make_lane({name: option for name, option in lane.items() if option is not None})
            if self.lane is not None:
                # A batch has many publishers: its handler sees the subscriber's context variables.
                self.lane.contextual = batch is None and self.mode in ("async", "thread")
        self.batch = batch
        self.timeout = timeout
        self.disable_after = disable_after
        self.on_error: Literal["raise", "log"] = on_error or ("log" if disable_after else "raise")
        self.active = True
        self._bus = bus
        self._counting = threading.Lock()
        self._failed = 0
        self._hung = 0
        self._calls = 0
        self._nanoseconds = 0

    # -------------------------------------------------------------------------------------------------- public

    def cancel(self) -> None:
        """Stop hearing events from the next publish on. Idempotent."""
        self._bus.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    @property
    def stats(self) -> Stats:
        """The counts at this moment."""
        if self.lane is not None:
            lane = self.lane.stats
        else:
            with self._counting:  # a timed call that raises is no call
                lane = LaneStats(self._calls + self._failed, self._calls, self._failed)
        counts = msgspec.structs.asdict(lane)
        pending_bytes = self.lane.bytes if isinstance(self.lane, SizedLane) else 0
        return Stats(**counts, bytes=pending_bytes, calls=self._calls, seconds=self._nanoseconds / 1e9)

    def __repr__(self) -> str:
        return f"<Subscription {self.label} to {self.mount_point}, priority {self.priority}, {self.mode}>"

    # ------------------------------------------------------------------------------------- for routes and the bus

    def call_for(self, event_type: type[Event]) -> Callable[[Any], object]:
        """Return what the route of ``event_type`` calls: the handler itself, or the hand-off to its lane."""
        if self.lane is None:
            return self.handler
        return self.lane.put_as_is if self._detaches and is_plain(event_type) else self.lane.put

    @property
    def isolated(self) -> bool:
        """True if an error in the route is reported instead of raised."""
        return self.on_error == "log"

    def isolate(self, error: Exception, event: Event) -> None:
        """Report an error of this handler (or of its hand-off) and go on."""
        self._bus.annotate(error, self, event)
        self._report(error)

    def spent(self, nanoseconds: int) -> None:
        """Count one timed call."""
        with self._counting:
            self._calls += 1
            self._nanoseconds += nanoseconds

    def serve(self, runtime: Runtime) -> None:
        """Start the consumer of an offloaded subscription."""
        if self.lane is None or self.mode == "stream":
            return
        if self.mode == "async":
            handler = cast("Callable[[Any], Awaitable[object]]", self.handler)
            runtime.serve_task(self.lane, handler, self._lane_failed, self._lane_broke, self.batch, self.timeout)
        else:
            runtime.serve_thread(self.lane, self.handler, self._lane_failed, self._lane_broke, self.batch, self._worker())

    def ended(self) -> None:
        """Take the news that the bus has let go of this subscription."""
        self.active = False
        if self.lane is not None:
            self.lane.retire("its subscription was cancelled")

    # ------------------------------------------------------------------------------------------------ internals

    def _worker(self) -> Callable[[MakeThread], Worker] | None:
        label, timeout = f"{self.label} ({self.mount_point})", self.timeout
        if self._target is not None:
            target, batched = self._target, self.batch is not None
            return lambda _: ProcessWorker(target, self.handler, label, batched=batched, timeout=timeout)
        if timeout is not None:
            return lambda make_thread: ThreadWorker(self.handler, timeout, label, make_thread)
        return None

    def _lane_failed(self, error: Exception) -> None:
        self._note_offloaded(error)
        if self.on_error == "raise":
            self._bus.fail(self, error)
        self._report(error)
        # A thread that hangs cannot be ended, and what does not start today will not start tomorrow.
        if (self.mode == "thread" and isinstance(error, HandlerTimeoutError)) or (
            isinstance(error, WorkerDiedError) and not error.started
        ):
            self._hung += 1
            if self._hung == _MOST_TIMEOUTS:
                self._retire()

    def _retire(self) -> None:
        if self.active:
            log.error("handler retired", handler=self.label, mount_point=self.mount_point, failures=self._failed)
            if self.lane is not None:
                self.lane.give_up("its handler was retired, because it failed too often")
            self.cancel()

    def _lane_broke(self, error: BaseException) -> None:
        # Not an Exception (SystemExit, say): never isolated, just as in an inline handler.
        self._note_offloaded(error)
        self._bus.fail(self, error)

    def _note_offloaded(self, error: BaseException) -> None:
        note = f"in the offloaded ({self.mode}) handler {self.label} of {self.mount_point}, {self.location}"
        if note not in getattr(error, "__notes__", ()):  # a handler may raise the same object every time
            error.add_note(note)

    def _report(self, error: Exception) -> None:
        with self._counting:
            self._failed += 1
            failures = self._failed
        log.error(
            "a handler failed",
            handler=self.label,
            mount_point=self.mount_point,
            mode=self.mode,
            failures=failures,
            exc_info=error,
        )
        if self.disable_after is not None and failures >= self.disable_after:
            self._retire()

    def _make_lane(self, options: dict[str, Any]) -> Lane | None:
        if self.mode == "inline":
            if options:
                raise SubscribeError(
                    f"{next(iter(options))}= is for offloaded handlers, and this one is a plain function that runs inline; "
                    'add offload="thread", or make it async'
                )
            return None
        capture, batch = options.pop("capture", None), options.pop("batch", None)
        self._detaches = capture is None  # nothing else is done to an event on its way into the lane
        queue, full, linger = options.get("queue", 1024), options.get("full", "block"), options.get("linger", 0.01)
        for name, value in (("queue", queue), ("batch", batch if batch is not None else 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SubscribeError(f"{name}={value!r}: give a positive number of events")
        if full not in FULL:
            raise SubscribeError(f"full={full!r}: a full lane can {', '.join(map(repr, FULL))}")
        if isinstance(linger, bool) or not isinstance(linger, int | float) or not 0 <= linger <= 60:
            raise SubscribeError(f"linger={linger!r}: give seconds between 0 and 60")
        timeout, max_bytes = options.get("timeout"), options.get("max_bytes")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e6):
            raise SubscribeError(f"timeout={timeout!r}: give the seconds after which a call of the handler has failed")
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise SubscribeError(f"max_bytes={max_bytes!r}: give a positive number of bytes")
        label = f"{self.label} ({self.mount_point})"
        if capture is not None:
            check_capture(capture)
            return SizedLane(label, capture, max_bytes=max_bytes, capacity=queue, full=full, linger=linger)
        if max_bytes is not None:
            raise SubscribeError("max_bytes= counts the tensors that capture= picks; for events without, queue= is the bound")
        return Lane(label, detacher(), capacity=queue, full=full, linger=linger)

    def _check_errors(self, on_error: str | None, disable_after: int | None) -> None:
        if on_error not in (None, "raise", "log"):
            raise SubscribeError(f'on_error={on_error!r}: "raise" ends the run, "log" reports and goes on')
        if disable_after is None:
            return
        if isinstance(disable_after, bool) or not isinstance(disable_after, int) or disable_after < 1:
            raise SubscribeError(f"disable_after={disable_after!r}: give the number of errors after which to retire it")
        if on_error == "raise":
            raise SubscribeError('disable_after= needs on_error="log": with "raise" the first error ends the run')


class _naming:  # noqa: N801 - used like a function
    """Adds to an error of the block which subscription it is about."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SubscribeError):
            which = self._subscription
            raise SubscribeError(f"cannot subscribe {which.label} to {which.mount_point}: {error}") from None


def is_async(handler: Callable[..., Any]) -> bool:
    """True for coroutine functions, partials of them, and objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def stream(event: Any) -> None:
    """Stands in for the handler of a stream, whose events are taken by whoever iterates over it."""


def _mode(handler: Callable[..., Any], offload: str | None) -> Mode:
    if handler is stream:
        return "stream"
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise SubscribeError("a handler with `yield` in it is a generator: calling it would run nothing; return instead")
    if offload not in (None, "inline", "thread", "process"):
        raise SubscribeError(
            f'offload={offload!r}: blocking work goes to offload="thread" or "process"; async functions are offloaded by '
            "nature; anything else runs inline"
        )
    if not is_async(handler):
        return cast("Mode", offload or "inline")
    if offload == "inline":
        raise SubscribeError(
            "an async function cannot run inline: publishing never awaits. Leave offload= out to run it on the bus's event "
            "loop, or make it a plain function"
        )
    if offload is not None:
        raise SubscribeError(
            f'an async function needs no offload="{offload}": it runs on the bus\'s event loop. Leave offload= out, or make it '
            f"a plain function to run it in a {offload}"
        )
    return "async"


def _check_arity(handler: Callable[..., Any], *, batched: bool) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # a builtin without a signature: nothing to check
    try:
        signature.bind(None)
    except TypeError:
        what = "a list of events" if batched else "the event"
        raise SubscribeError(f"a handler is called with one argument, {what}; this one takes {signature}") from None


def _check_options(filters: dict[str, Any]) -> None:
    for name in filters:
        if name not in FILTERS:
            known = [*Options.__annotations__, "capture", "batch"]
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"the options are {', '.join(known)}"
            raise SubscribeError(f"there is no option {name}=; {hint}")


def _check_counts(event: type[Event]) -> None:
    if event.counts != "publish" and "progress" not in event.__struct_fields__:
        raise SubscribeError(
            f"{event.__name__}.counts is {event.counts!r}, but the event has no field `progress: Progress` to count by; add it "
            "or leave `counts` out to count its publishes"
        )


def _label(handler: object, hook: Hook | None) -> str:
    if not callable(handler):
        return repr(handler)
    name = getattr(_unwrapped(handler), "__name__", type(handler).__name__)
    if hook is not None:
        return f"{hook.label}.{name}"
    return str(name)


def _location(handler: Callable[..., Any]) -> str:
    function = _unwrapped(handler)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return "builtin"
    path = Path(code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{code.co_firstlineno}"


def _unwrapped(handler: Any) -> Any:
    if isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.unwrap(getattr(handler, "__func__", handler))
