"""Handlers: where they run, their labels, and their options in ``bus.on``; ``History``, the handler that keeps events."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast

import msgspec
from msgspec import Meta

from trainbus.eventloop.annotations import fields_of
from trainbus.eventloop.bus.hook import Hook, Ranks
from trainbus.eventloop.bus.priority import PriorityLike
from trainbus.eventloop.checks import check_picks, check_value, is_async, is_generator
from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.offload import Full, Lane, SizedLane, capture, detacher
from trainbus.eventloop.spelling import option_meant

Mode = Literal["inline", "async", "thread", "process", "stream", "history"]
_Events = Annotated[int, Meta(ge=1, description="a positive number of events")]


class FilterOptions(TypedDict, total=False):
    """Keyword options of ``bus.keep``, which also takes ``last`` and ``capture``: priority and filters of the events."""

    priority: PriorityLike
    every: Annotated[int, Meta(ge=1)]
    once: int | Iterable[int]
    after: Annotated[int, Meta(ge=0)]
    before: Annotated[int, Meta(ge=1)]
    when: Callable[[Any], object]
    every_seconds: Annotated[float, Meta(gt=0, lt=1e9, description="a positive number of seconds")]


class LaneOptions(FilterOptions, total=False):
    """The options of everything that has a lane."""

    queue: _Events
    max_bytes: Annotated[int, Meta(ge=1, description="a positive number of bytes")]
    full: Full
    linger: Annotated[float, Meta(ge=0, le=60, description="seconds between 0 and 60")]


class StreamOptions(LaneOptions, total=False):
    """Keyword options of ``bus.stream``, which also takes ``capture``: filters and the lane, as in :class:`HandlerOptions`.

    ``replay``: the number of earlier events to begin with; see ``bus.stream``.
    """

    replay: Annotated[int, Meta(ge=0, description="a number of events")]


class HandlerOptions(LaneOptions, total=False):
    """Keyword options of ``bus.on`` and ``@mount``, which also take ``capture`` and ``batch`` (see ``Bus.on``).

    ``every``, ``once``, ``after``, ``before``, ``when``, ``every_seconds``: filters, see :mod:`trainbus.eventloop.bus.filters`.
    ``offload``: ``"thread"`` for a blocking handler, ``"process"`` for one that computes in Python (a function at the top level
    of a module, called in a worker process); ``"inline"`` states the default of a plain function.
    ``queue``, ``full``, ``linger``: the lane of an offloaded handler: its capacity (1024 events), the policy of a full lane
    (``"block"``, ``"drop_old"``, ``"drop_new"``, ``"latest"``, ``"raise"``), and the seconds between polls (0.01).
    ``max_bytes``: with ``capture``, the largest size of pending tensors in bytes; ``full`` applies to it as well.
    ``timeout``: seconds after which a call of an offloaded handler has failed. An async call is cancelled, a thread is
    abandoned (after three, the handler is retired), and a worker process is killed and replaced.
    ``on_error``: ``"raise"`` or ``"log"``. ``disable_after``: number of errors that retire the handler (implies "log").
    ``ranks``: ``"rank0"`` for a handler that only rank 0 calls, if several processes train together.
    """

    offload: Literal["inline", "thread", "process"]
    timeout: Annotated[float, Meta(gt=0, lt=1e6, description="the seconds after which a call of the handler has failed")]
    on_error: Literal["raise", "log"]
    disable_after: Annotated[int, Meta(ge=1, description="the number of errors after which to retire it")]
    ranks: Ranks


_PICKS = 'a function that picks what the handler needs from the event, such as lambda event: event.outputs["logits"]'
_OPTIONS: dict[str, Any] = {
    **fields_of(HandlerOptions),
    "capture": Annotated[Callable[[Any], Any], Meta(description=_PICKS)],
    "batch": _Events,
}
_LANE_OPTIONS = ("capture", "queue", "full", "linger", "max_bytes", "timeout", "batch")


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None; raise SubscribeError for an unknown one or an invalid value."""
    for name in options:
        if name not in _OPTIONS:
            hint = option_meant(name, options[name], _OPTIONS) or f"the options are {', '.join(_OPTIONS)}"
            raise SubscribeError(f"{name}= is not an option; {hint}")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name != "priority":  # checked by Priority.parse
            check_value(name, value, _OPTIONS[name], SubscribeError)
    if given.get("on_error") == "raise" and "disable_after" in given:
        raise SubscribeError('disable_after= needs on_error="log": with "raise" the first error ends the run')
    return given


def stream(event: Any) -> None:
    """Do nothing: placeholder for the handler of a stream, whose reader takes the events."""


def mode_of(handler: Callable[..., Any], offload: str | None) -> Mode:
    """Return where a handler runs; raise SubscribeError for one that cannot be called, or not with this ``offload``."""
    if handler is stream:
        return "stream"
    if isinstance(handler, History):
        return "history"
    if handler is None:
        raise SubscribeError("bus.on(..., f()) subscribes the result of f(), which is None; write bus.on(..., f)")
    if not callable(handler):
        raise SubscribeError("a handler is a function (or an object with __call__) that takes the event")
    if is_generator(handler):
        raise SubscribeError("a handler with `yield` in it is a generator: calling it would run nothing; return instead")
    if not is_async(handler):
        return cast("Mode", offload or "inline")
    if offload is not None:
        why = "cannot run inline: publishing never awaits" if offload == "inline" else f'needs no offload="{offload}"'
        where = "inline" if offload == "inline" else f"in a {offload}"
        raise SubscribeError(
            f"an async function {why}. Leave offload= out to run it on the bus's event loop, or make it a plain function to "
            f"run it {where}"
        )
    return "async"


def make_lane(label: str, mode: Mode, options: Mapping[str, Any]) -> Lane | None:
    """Return the lane of a handler, or None for an inline one; raise SubscribeError for options that do not fit together."""
    if mode == "history":
        return None
    if mode == "inline":
        for name in _LANE_OPTIONS:
            if name in options:
                raise SubscribeError(
                    f"{name}= is for offloaded handlers, but this one is a plain function that runs inline; "
                    'add offload="thread", or make it async'
                )
        return None
    names = {"queue": "capacity", "full": "full", "linger": "linger"}
    sizes = {names[name]: value for name, value in options.items() if name in names}
    if "capture" in options:
        check_picks("capture", options["capture"], "what the handler needs")
        lane: Lane = SizedLane(label, options["capture"], max_bytes=options.get("max_bytes"), **sizes)
    elif "max_bytes" in options:
        raise SubscribeError("max_bytes= counts the tensors that capture= picks; for events without, queue= is the bound")
    else:
        lane = Lane(label, detacher(), **sizes)
    # A batch has many publishers: its handler sees the subscriber's context variables.
    lane.contextual = "batch" not in options and mode in ("async", "thread")
    return lane


def label_of(handler: object, hook: Hook | None) -> str:
    """Return the name of a handler in tables: ``"watch"``, ``"EMAHook.after_train_iter"``, ``"lambda at train.py:12"``."""
    if not callable(handler):
        return repr(handler)  # for the error that refuses it
    name = str(getattr(unwrapped(handler), "__name__", type(handler).__name__))
    if name == "<lambda>":  # several have this name
        name = f"lambda at {location_of(handler).rpartition('/')[2]}"
    return name if hook is None else f"{hook.label}.{name}"


def location_of(handler: Callable[..., Any]) -> str:
    """Return the folder, file and line of a handler's code: ``"mine/train.py:12"``."""
    function = unwrapped(handler)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return "builtin"
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno}"


def unwrapped(handler: Any) -> Any:
    """Return the user's function in a handler: without partial, method and decorators that wrap."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.unwrap(getattr(handler, "__func__", handler))


Picks = Callable[[Any], Any]


class History:
    """Keep the last events of some mount points, and pass each one to the streams.

    It is the handler of one subscription. So each event is filtered and copied once.

    Args:
        picks: the ``capture=`` of the streams; None for the events themselves.
        last: the number of events to keep.
    """

    __name__ = "history"

    def __init__(self, picks: Picks | None, last: int) -> None:
        if picks is not None:
            check_picks("capture", picks, "what the streams need")
        self.by_user = False
        """True after ``bus.keep()``: without it, the history ends with its last stream."""
        self._make_item = detacher() if picks is None else functools.partial(_capture_event, picks)
        self._kept: deque[Any] = deque(maxlen=last)
        self._lanes: tuple[Lane, ...] = ()
        # Re-entrant, because the garbage collector may end a stream while this thread holds it.
        self._lock = threading.RLock()

    def __call__(self, event: Any) -> None:
        """Keep an event and put it into the lanes."""
        item = self._make_item(event)
        with self._lock:  # a stream that begins gets this event once: from here, or from its lane
            self._kept.append(item)
            lanes = self._lanes
        for lane in lanes:  # without the lock, because a full lane may make the publisher wait
            lane.put_as_is(item)

    @property
    def streams(self) -> int:
        """The number of streams."""
        return len(self._lanes)

    def keep(self, last: int) -> None:
        """Keep at least ``last`` events from now on."""
        with self._lock:
            if last > (self._kept.maxlen or 0):
                self._kept = deque(self._kept, maxlen=last)

    def join(self, lane: Lane, replay: int) -> None:
        """Put the last ``replay`` events and all later ones into a lane."""
        with self._lock:
            lane.fill(list(self._kept)[-replay:])
            self._lanes = (*self._lanes, lane)

    def leave(self, lane: Lane) -> None:
        """Stop putting events into a lane; publishes under way still reach it."""
        with self._lock:
            self._lanes = tuple(one for one in self._lanes if one is not lane)
        lane.retire("its stream was left")

    def end_streams(self) -> None:
        """End all streams after their queued events."""
        for lane in self._lanes:
            self.leave(lane)

    def become_inert(self) -> None:
        """Close the lanes in a forked child, where another thread may have held the locks."""
        self._lock = threading.RLock()
        for lane in self._lanes:
            lane.become_inert()
        self._lanes = ()


def _capture_event(picks: Picks, event: Any) -> Any:
    return msgspec.structs.replace(capture(picks(event)), source=(type(event), getattr(event, "progress", None)))
