"""One subscription: its options, checked when it is made, and its side of dispatch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self

import msgspec

from eventloop.bus.filters import Filter, make_filter
from eventloop.bus.handlers import Mode, label_of, location_of, mode_of
from eventloop.bus.hook import Hook
from eventloop.bus.lane_options import LaneOptions
from eventloop.bus.options import Where, check_counts, check_errors, check_names, check_ranks
from eventloop.bus.priority import Priority, PriorityLike
from eventloop.bus.routes import annotate, is_offloaded, note_offloaded
from eventloop.callables import check_arity
from eventloop.errors import HandlerTimeoutError, SubscribeError, WorkerDiedError, stopped
from eventloop.events import Event
from eventloop.events.event import moment, name_of
from eventloop.log import get_logger
from eventloop.offload import Delivery, Full, LaneStats, Runtime, Sources, is_plain, target_of

_MOST_TIMEOUTS = 3  # handlers that hang in threads left behind, or worker processes that do not start, before it is retired

log = get_logger()


class Owner(Protocol):
    """What a subscription needs to know of its bus."""

    def fail(self, subscription: Any, error: BaseException) -> None:
        """Have ``error`` raised on the training thread."""

    def remove(self, *subscriptions: Any) -> None:
        """Let go of subscriptions."""


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
        ranks: Where = "all",
        **filters: Any,
    ) -> None:
        events = event if isinstance(event, tuple) else (event,)
        self.mount_points = tuple(map(name_of, events))
        self.mount_point = ", ".join(self.mount_points)
        self.handler = handler
        self.hook = hook
        self.label = label_of(handler, hook)
        self.location = location_of(handler)
        with _naming(self):
            if handler is None:
                raise SubscribeError("bus.on(..., f()) subscribes what f has returned, which is None; write bus.on(..., f)")
            if not callable(handler):
                raise SubscribeError("a handler is a function (or an object with __call__) that takes the event")
            check_names(filters)
            self.priority = Priority.parse(priority)
            self.filter: Filter | None = make_filter(**filters)
            if self.filter is not None and self.filter.counted:
                for one in events:
                    check_counts(one)
            self.mode: Mode = mode_of(handler, offload)
            check_arity(handler, "a handler", "the event" if batch is None else "a list of events")
            check_errors(on_error, disable_after)
            check_ranks(ranks)
            self._target = target_of(handler) if self.mode == "process" else None
            asked = LaneOptions(capture, queue, full, linger, max_bytes, timeout, batch)
            if self.mode == "inline":
                asked.refuse()
                self.lane = None
            else:
                self.lane = asked.make(f"{self.label} ({self.mount_point})")
                # A batch has many publishers: its handler sees the subscriber's context variables.
                self.lane.contextual = batch is None and self.mode in ("async", "thread")
        self._detaches = capture is None  # nothing else is done to an event on its way into the lane
        self.ranks: Where = ranks
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
        pending_bytes = 0 if self.lane is None else self.lane.bytes
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
        if is_offloaded(error):
            raise error  # of another handler, which a publish in here had to raise
        annotate(error, self, event)
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
        delivery = Delivery(
            self.lane,
            self.handler,
            self._lane_failed,
            self._lane_broke,
            batch=self.batch,
            loud=self.on_error == "raise",
            is_async=self.mode == "async",
            timeout=self.timeout,
            target=self._target,
        )
        runtime.serve(delivery)

    def ended(self) -> None:
        """Take the news that the bus has let go of this subscription."""
        self.active = False
        if self.lane is not None:
            self.lane.retire("its subscription was cancelled")

    # ------------------------------------------------------------------------------------------------ internals

    def _lane_failed(self, error: Exception, events: Sources) -> None:
        if isinstance(error, StopIteration | StopAsyncIteration):  # the training thread raises it within its iterators
            error = stopped(error, f"{self.label} of {self.mount_point}")
        self._note_offloaded(error, events)
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

    def _lane_broke(self, error: BaseException, events: Sources) -> None:
        # Not an Exception (SystemExit, say): never isolated, just as in an inline handler.
        self._note_offloaded(error, events)
        self._bus.fail(self, error)

    def _note_offloaded(self, error: BaseException, events: Sources) -> None:
        moments = [moment(*event) for event in (events[0], events[-1])] if events else [self.mount_point]
        note_offloaded(error, self, " to ".join(dict.fromkeys(moments)))

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


class _naming:  # noqa: N801 - used like a function
    """Adds to an error of the block which subscription it is about."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SubscribeError):
            which = self._subscription
            raise SubscribeError(f"cannot subscribe {which.label} to {which.mount_point}: {error}") from None
