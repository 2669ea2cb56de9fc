"""``bus.stream`` and ``bus.keep``: let applications read events, and keep the last events for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import msgspec

from trainbus.eventloop.annotations import fields_of
from trainbus.eventloop.bus.handler import FilterOptions, History, LaneOptions, StreamOptions, checked_options, stream
from trainbus.eventloop.bus.lifecycle import Lifecycle
from trainbus.eventloop.bus.stream import Stream
from trainbus.eventloop.bus.subscription import Stats, Subscription
from trainbus.eventloop.checks import check_value
from trainbus.eventloop.errors import BusStateError, SubscribeError
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import resolve
from trainbus.eventloop.offload import Lane
from trainbus.eventloop.spelling import option_meant

_FILTERS = (*FilterOptions.__annotations__,)
_KNOWN = ("capture", *StreamOptions.__annotations__)
_EVENTS = fields_of(StreamOptions)["replay"]
_QUEUE = 1024


class Streams(Lifecycle):
    """The part of a bus for applications that read events."""

    # Bus defines these.
    _insert: Callable[[list[Subscription]], None]
    _remove: Callable[..., None]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._histories: list[_Kept] = []

    def keep(
        self,
        event: type[Event] | str,
        /,
        *more: type[Event] | str,
        last: int = 100,
        capture: Callable[[Any], Any] | None = None,
        **options: Unpack[FilterOptions],
    ) -> Subscription:
        """Keep the last events, for streams with ``replay=`` that begin later.

            bus.keep("after_train_iter", every=10, last=1000)               # before the run, anywhere
            ...
            async for event in bus.stream("after_train_iter", every=10, replay=1000):    # for each visitor of a page

        Events are kept from this call until the subscription is cancelled, also after the bus has closed. A stream replays
        them if its mount points, filters, priority and ``capture`` are the same ones (the same function, not another lambda).

        Args:
            event: as for :meth:`on`.
            *more: further mount points.
            last: the number of events of all mount points together; with ``capture``, the number of its values.
            capture: as for :meth:`stream`.
            **options: ``priority`` and filters, as for :meth:`on`.

        Raises:
            SubscribeError: as for :meth:`on`.
        """
        _check_names("bus.keep", options, _FILTERS, further=("last", "capture"))
        check_value("last", last, _EVENTS, SubscribeError)
        with self._lock:
            kept = self._kept(tuple(map(resolve, (event, *more))), capture, options, max(1, last))
            kept.history.by_user = True
        self._unlocked()
        return kept.subscription

    def _stream(self, events: Sequence[type[Event] | str], options: dict[str, Any]) -> Any:
        _check_names("bus.stream", options, _KNOWN)
        given: dict[str, Any] = {"full": "drop_old", **options}
        replay = given.pop("replay", None)
        types = tuple(map(resolve, events))
        if replay is not None:
            check_value("replay", replay, _EVENTS, SubscribeError)
        if replay:
            return self._replaying(types, replay, given)
        subscription = Subscription(self, types, stream, **given)
        made = self._read(subscription)
        with self._lock:
            self._insert([subscription])
            if self._over:
                self._end_streams()  # the bus has closed
        self._unlocked()
        return made

    def _replaying(self, events: tuple[type[Event], ...], replay: int, options: dict[str, Any]) -> Stream[Any]:
        lane = _lane(events, replay, options)
        filters = {name: value for name, value in options.items() if name in _FILTERS}
        with self._lock:
            kept = self._kept(events, options.get("capture"), filters, replay)
            try:
                made = self._read(_Branch(lane, kept.history, lambda: self._left(kept)))
            except BaseException:
                self._left(kept)
                raise
            kept.history.join(lane, replay)
            if self._over:
                self._end_streams()
        self._unlocked()
        return made

    def _read(self, source: Any) -> Stream[Any]:
        try:
            return Stream[Any](source, self.internal.interrupt)
        except RuntimeError as error:
            raise BusStateError(f"bus.stream() needs a running event loop; call it in async code: {error}") from None

    def _kept(self, events: tuple[type[Event], ...], picks: Any, filters: Any, last: int) -> _Kept:
        """Return the history of these events, a new one if there is none; called with the lock held."""
        history = History(checked_options({"capture": picks}).get("capture"), last)
        made = _Kept(Subscription(self, events, history, **filters), history, picks)
        self._histories = [one for one in self._histories if one.subscription.active]
        for one in self._histories:
            if one.key == made.key:
                one.history.keep(last)
                return one
        self._insert([made.subscription])
        self._histories.append(made)
        return made

    def _left(self, kept: _Kept) -> None:
        with self._lock:
            if not kept.history.streams and not kept.history.by_user:
                self._remove(kept.subscription)
        self._unlocked()

    def _end_streams(self) -> None:
        self._remove(*(one for one in self._directory.ordered() if one.mode == "stream"))
        for kept in self._histories:
            kept.history.end_streams()
            self._left(kept)


class _Kept(NamedTuple):
    """A history and its subscription."""

    subscription: Subscription
    history: History
    picks: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that streams of one history share."""
        one = self.subscription.filter
        filters = None if one is None else (one.every, one.once, one.after, one.before, one.when, one.every_seconds)
        return frozenset(self.subscription.mount_points), self.subscription.priority, filters, self.picks


class _Branch:
    """One stream of a history, which its reader uses like a subscription."""

    def __init__(self, lane: Lane, history: History, left: Callable[[], object]) -> None:
        self.lane = lane
        self._history = history
        self._left = left

    @property
    def stats(self) -> Stats:
        return Stats(**msgspec.structs.asdict(self.lane.stats))

    def cancel(self) -> None:
        self._history.leave(self.lane)
        self._left()


def _check_names(owner: str, options: Mapping[str, Any], known: Sequence[str], *, further: Sequence[str] = ()) -> None:
    """Raise SubscribeError for an unknown option; ``further`` are the owner's other options."""
    for name in options:
        if name not in known:
            every = (*further, *known)
            hint = option_meant(name, options[name], every) or f"its options are {', '.join(every)}"
            raise SubscribeError(f"{owner} has no option {name}=; {hint}")


def _lane(events: tuple[type[Event], ...], replay: int, options: dict[str, Any]) -> Lane:
    """Return the lane of a stream that gets events from a history; raise SubscribeError for options that do not fit."""
    given = checked_options({name: value for name, value in options.items() if name in LaneOptions.__annotations__})
    queue = given.get("queue", max(replay, _QUEUE))
    if "max_bytes" in given:
        raise SubscribeError(
            "max_bytes= does not work with replay=: these streams share their copies; set replay= and queue= instead"
        )
    if queue < replay:
        raise SubscribeError(f"replay={replay} events do not fit in queue={queue}; give a queue of at least {replay}")
    label = f"stream ({', '.join(event.__name__ for event in events)})"
    more = {"linger": given["linger"]} if "linger" in given else {}
    return Lane(label, lambda item: item, capacity=queue, full=given["full"], **more)
