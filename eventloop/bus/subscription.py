"""One subscription: its options, checked when it is made, and its side of dispatch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, Self

import msgspec
import torch

from trainbus.eventloop.bus.filters import make_filter
from trainbus.eventloop.bus.handler import History, Mode, checked_options, label_of, location_of, make_lane, mode_of
from trainbus.eventloop.bus.hook import Hook, Ranks
from trainbus.eventloop.bus.priority import Priority
from trainbus.eventloop.checks import check_arity, returns_no_coroutine
from trainbus.eventloop.errors import HandlerTimeoutError, SubscribeError, WorkerDiedError, stopped
from trainbus.eventloop.events import AfterRun, Event
from trainbus.eventloop.events.event import describe_position, name_of
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload import (
    Deadline,
    Delivery,
    DrainReport,
    HookLanes,
    Lane,
    Runtime,
    Sources,
    absent_entry,
    check_importable,
    is_plain,
    unarrived,
)
from trainbus.eventloop.user_errors import add_note, notes_of

_MOST_TIMEOUTS = 3  # abandoned threads, or worker processes that fail to start, after which a handler is retired
OFFLOADED = "in the offloaded"  # begins the note on an error of an offloaded handler

log = get_logger()


class _Internal(Protocol):
    def fail(self, subscription: Any, error: BaseException) -> None: ...
    def remove(self, *subscriptions: Any) -> None: ...
    def count_calls(self) -> None: ...
    def wait_for_lanes(self, lanes: HookLanes) -> object: ...
    def patience(self) -> Deadline: ...


class _Bus(Protocol):
    @property
    def internal(self) -> _Internal: ...


class Stats(DrainReport, frozen=True):
    """Counts of one subscription: ``published``, ``delivered``, ``failed``, ``dropped``, ``pending`` and the fields below.

    ``published == delivered + failed + dropped + pending`` at every moment. Offloaded ones count always; inline ones count
    isolated errors always and delivered events only while ``bus.timing`` is on, because counting costs as much as a call.
    ``bytes`` is the size of the captured tensors that are pending; ``calls`` and ``seconds`` are counted while ``bus.timing``
    is on (of an offloaded one, the hand-off on the publisher).
    """

    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0


class Subscription:
    """The handle that ``bus.on(event, handler)`` returns. ``cancel()`` it, or use it as a context manager.

    An offloaded handler still gets the events before the cancel. Options: :class:`trainbus.eventloop.bus.HandlerOptions`.

    Raises:
        SubscribeError: an option is unknown or does not fit the handler.
    """

    def __init__(
        self,
        bus: _Bus,
        events: tuple[type[Event], ...],
        handler: Callable[..., Any],
        hook: Hook | None = None,
        **options: Any,
    ) -> None:
        self.mount_points = tuple(map(name_of, events))
        self.mount_point = ", ".join(self.mount_points)
        self.handler = handler
        self.hook = hook
        self.label = label_of(handler, hook)
        self.location = location_of(handler)
        try:
            given = checked_options(options)
            self.priority = Priority.parse(given.get("priority", Priority.NORMAL))
            self.filter = make_filter(events, given)
            self.mode: Mode = mode_of(handler, given.get("offload"))
            self.batch: int | None = given.get("batch")
            check_arity(handler, "a handler", "the event" if self.batch is None else "a list of events")
            if self.mode == "process":
                check_importable(handler)
            self.returns_no_coroutine = self.mode != "inline" or returns_no_coroutine(handler)
            self.lane = make_lane(f"{self.label} ({self.mount_point})", self.mode, given)
        except SubscribeError as error:
            raise SubscribeError(f"cannot subscribe {self.label} to {self.mount_point}: {error}") from None
        self._detaches = "capture" not in given  # True if an event goes into the lane without a filter or a capture
        self.ranks: Ranks = given.get("ranks", "all")
        self.timeout: float | None = given.get("timeout")
        self.disable_after: int | None = given.get("disable_after")
        self.on_error: Literal["raise", "log"] = given.get("on_error", "log" if self.disable_after else "raise")
        self.active = True
        self.siblings: HookLanes | None = None
        """The lanes of the hook, if its class has offloaded methods."""
        self._bus = bus
        self._counting = threading.RLock()  # re-entrant for the handlers of signals
        self._failed = self._hung = self._calls = self._nanoseconds = 0

    def is_on(self, bus: object) -> bool:
        """Return True if it is a subscription of this bus."""
        return self._bus is bus

    def cancel(self) -> None:
        """End the subscription before the next publish. Idempotent."""
        self._bus.internal.remove(self)

    def join(self) -> None:
        """Wait until an offloaded handler is done with the events so far."""
        if self.lane is not None:
            self.lane.join(Deadline(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    @property
    def stats(self) -> Stats:
        """The counts at this moment."""
        self._bus.internal.count_calls()
        with self._counting:
            calls, failed, seconds = self._calls, self._failed, self._nanoseconds / 1e9
        if self.lane is None:
            # A timed call that raises is not in calls.
            return Stats(delivered=calls, failed=failed, calls=calls, seconds=seconds)
        return Stats(**msgspec.structs.asdict(self.lane.stats), bytes=self.lane.bytes, calls=calls, seconds=seconds)

    def waiting(self) -> list[tuple[Any, list[tuple[list[str], torch.Tensor]]]]:
        """Return the events that an offloaded handler has not finished, oldest first; does not wait for a device.

        Each comes with the scalars that it lacks, because they are still on a device: names, and their values in one tensor.
        """
        return [] if self.lane is None else [unarrived(item) for item in self.lane.waiting()]

    def __repr__(self) -> str:
        return f"<Subscription {self.label} to {self.mount_point}, priority {self.priority}, {self.mode}>"

    def call_for(self, event_type: type[Event]) -> Callable[[Any], object]:
        """Return the function that the route of ``event_type`` calls: the handler, or the hand-off to its lane."""
        comes_last = self.siblings is not None and issubclass(event_type, AfterRun)
        if self.lane is None:
            return self._call_last if comes_last else self.handler
        if comes_last:
            return self._put_last
        as_is = self._detaches and self.lane.meter is None and is_plain(event_type)
        return self.lane.put_as_is if as_is else self.lane.put

    def spent(self, calls: int, nanoseconds: int) -> None:
        """Count timed calls."""
        with self._counting:
            self._calls += calls
            self._nanoseconds += nanoseconds

    def blame(self, error: Exception, event: Event) -> None:
        """Add the handler, its location and the moment as a note to an error of this handler or its hand-off."""
        if isinstance(error, StopIteration | StopAsyncIteration):  # iterators that publish would take it as their end
            error = stopped(error, f"{self.label} of {name_of(type(event))}")
            self._annotate(error, event)
            raise error
        self._annotate(error, event)

    def isolate(self, error: Exception, event: Event) -> None:
        """Log an error of this handler (or of its hand-off) instead of raising it."""
        if _is_offloaded(error):
            raise error  # the error of another handler, which a publish in this handler raised
        self._annotate(error, event)
        self._report(error)

    def delivery(self, lane: Lane) -> Delivery:
        """Return what the consumer of the lane has to know."""
        return Delivery(
            lane,
            self.handler,
            self._lane_failed,
            self._lane_broke,
            batch=self.batch,
            loud=self.on_error == "raise",
            is_async=self.mode == "async",
            timeout=self.timeout,
            in_process=self.mode == "process",
        )

    def ended(self) -> None:
        """Retire the lane after the bus has removed this subscription."""
        self.active = False
        if self.lane is not None:
            self.lane.retire("its subscription was cancelled")
        if isinstance(self.handler, History):
            self.handler.end_streams()

    def become_inert(self) -> None:
        """Close the lane in a forked child."""
        if self.lane is not None:
            self.lane.become_inert()
        if isinstance(self.handler, History):
            self.handler.become_inert()

    def _call_last(self, event: Any) -> object:
        """Call the inline handler when the lanes of its hook are empty."""
        if self.siblings is not None:
            self._bus.internal.wait_for_lanes(self.siblings)
        return self.handler(event)

    def _put_last(self, event: Any) -> None:
        """Queue an event that is delivered when the lanes of the hook are empty, also those with other consumers."""
        if self.lane is not None and self.siblings is not None:
            self.lane.put(event, self.siblings.marks(self.lane, self._bus.internal.patience()))

    def _annotate(self, error: BaseException, event: Event) -> None:
        where = f"in {self.label} ({self.mode}, priority {self.priority}, {self.location}) at "
        where += describe_position(type(event), getattr(event, "progress", None))
        add_note(error, f"raised later, {where}" if _is_offloaded(error) else where)

    def _note_offloaded(self, error: BaseException, events: Sources) -> None:
        note = f"{OFFLOADED} ({self.mode}) handler {self.label} of "
        # A handler may raise the same object each time.
        if not any(other.startswith(note) for other in notes_of(error)):
            positions = [describe_position(*event) for event in (events[0], events[-1])] if events else [self.mount_point]
            add_note(error, f"{note}{' to '.join(dict.fromkeys(positions))}, {self.location}")
            if events and self._detaches and (advice := absent_entry(error, events[0][0])):
                add_note(error, advice)

    def _lane_failed(self, error: Exception, events: Sources) -> None:
        if isinstance(error, StopIteration | StopAsyncIteration):  # the training thread raises it within its iterators
            error = stopped(error, f"{self.label} of {self.mount_point}")
        self._note_offloaded(error, events)
        if self.on_error == "raise":
            self._bus.internal.fail(self, error)
        self._report(error)
        # A hanging thread cannot be killed, and a worker that fails to start would fail again.
        if (self.mode == "thread" and isinstance(error, HandlerTimeoutError)) or (
            isinstance(error, WorkerDiedError) and not error.started
        ):
            self._hung += 1
            if self._hung == _MOST_TIMEOUTS:
                self._retire()

    def _lane_broke(self, error: BaseException, events: Sources) -> None:
        # Not an Exception (SystemExit, say): never isolated, just as in an inline handler.
        self._note_offloaded(error, events)
        self._bus.internal.fail(self, error)

    def _report(self, error: Exception) -> None:
        with self._counting:
            self._failed += 1
            failures = self._failed
        log.error(
            "a handler failed",
            id="handler-failed",
            handler=self.label,
            mount_point=self.mount_point,
            mode=self.mode,
            failures=failures,
            exc_info=error,
        )
        if self.disable_after is not None and failures >= self.disable_after:
            self._retire()

    def _retire(self) -> None:
        if self.active:
            log.error(
                "handler retired", id="handler-retired", handler=self.label, mount_point=self.mount_point, failures=self._failed
            )
            if self.lane is not None:
                self.lane.give_up("its handler was retired, because it failed too often")
            self.cancel()


def _is_offloaded(error: BaseException) -> bool:
    """Return True for an error of an offloaded handler, which a later publish raises again, in any handler that publishes."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_offloaded, error.exceptions))
    return any(note.startswith(OFFLOADED) for note in notes_of(error))


def serve(runtime: Runtime, subscriptions: Iterable[Subscription]) -> None:
    """Start the consumers of offloaded subscriptions: one for each function, and for each hook and mode."""
    together: dict[object, list[tuple[Subscription, Lane]]] = {}
    for one in subscriptions:
        if one.lane is not None and one.mode != "stream":
            key = one if one.lane.number is None else (one.siblings, one.mode)
            together.setdefault(key, []).append((one, one.lane))
    for found in together.values():
        first, lane = found[0]
        label = lane.label if lane.number is None or first.siblings is None else first.siblings.label
        runtime.serve(label, [one.delivery(own) for one, own in found], lane.number)


def join_lanes(hook: Hook, subscriptions: Sequence[Subscription]) -> None:
    """Give the subscriptions of a hook, if some are offloaded, their common lanes."""
    modes: dict[str, list[Lane]] = {}
    for one in subscriptions:
        if one.lane is not None:
            modes.setdefault(one.mode, []).append(one.lane)
    siblings = HookLanes(hook.label, modes.values()) if modes else None
    for one in subscriptions:
        one.siblings = siblings
