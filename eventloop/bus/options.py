"""The options of ``bus.on``, ``bus.stream`` and ``@mount``; how they are checked where they are not the lane's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, get_args

from eventloop.bus.filters import FILTERS
from eventloop.bus.priority import PriorityLike
from eventloop.errors import SubscribeError
from eventloop.events import Event
from eventloop.offload import Full

Where = Literal["all", "rank0"]


class StreamOptions(TypedDict, total=False):
    """Keyword options of ``bus.stream``, which also takes ``capture``: filters and the lane, as in :class:`HandlerOptions`."""

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


class HandlerOptions(StreamOptions, total=False):
    """Keyword options of ``bus.on`` and ``@mount``, which also take ``capture`` and ``batch`` (see ``Bus.on``).

    ``every``, ``once``, ``after``, ``before``, ``when``, ``every_seconds``: filters, see :mod:`eventloop.bus.filters`.
    ``offload``: ``"thread"`` for a blocking handler, ``"process"`` for one that computes in Python (a function at the top level
    of a module, called in a worker process); ``"inline"`` says out loud what a plain function does anyway.
    ``queue``, ``full``, ``linger``: the lane of an offloaded handler: its places (1024), what happens when they are
    taken (``"block"``, ``"drop_old"``, ``"drop_new"``, ``"latest"``, ``"raise"``), seconds between looks (0.01).
    ``max_bytes``: with ``capture``, bytes of tensors that may wait or be in the handler's hands; ``full`` applies to them, too.
    ``timeout``: seconds after which a call of an offloaded handler has failed: async it is cancelled, in a thread left behind
    (three times, then the handler is retired), in a process killed with its worker, which is replaced.
    ``on_error``: ``"raise"`` or ``"log"``. ``disable_after``: retire the handler after so many errors (implies "log").
    ``ranks``: where several processes train together, ``"rank0"`` for a handler that only the first of them calls.
    """

    offload: Literal["inline", "thread", "process"]
    timeout: float
    on_error: Literal["raise", "log"]
    disable_after: int
    ranks: Where


def check_names(filters: dict[str, Any]) -> None:
    """Check that what ``bus.on`` does not know by name are filters."""
    for name in filters:
        if name not in FILTERS:
            known = [*HandlerOptions.__annotations__, "capture", "batch"]
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"the options are {', '.join(known)}"
            raise SubscribeError(f"there is no option {name}=; {hint}")


def check_stream_names(options: dict[str, Any]) -> None:
    """Check that ``bus.stream`` takes all of ``options``."""
    known = ["capture", *StreamOptions.__annotations__]
    for name in options:
        if name not in known:
            raise SubscribeError(f"bus.stream takes no {name}=; its options are {', '.join(known)}")


def check_counts(event: type[Event]) -> None:
    """Check that an event has what a filter would count."""
    if event.counts != "publish" and "progress" not in event.__struct_fields__:
        raise SubscribeError(
            f"{event.__name__}.counts is {event.counts!r}, but the event has no field `progress: Progress` to count by; add it "
            "or leave `counts` out to count its publishes"
        )


def check_ranks(ranks: object) -> None:
    """Check on which processes a handler is to run."""
    if ranks not in get_args(Where):
        raise SubscribeError(f'ranks={ranks!r}: a handler runs on "all" processes that train together, or on "rank0" alone')


def check_errors(on_error: str | None, disable_after: int | None) -> None:
    """Check what is to become of a handler's errors."""
    if on_error not in (None, "raise", "log"):
        raise SubscribeError(f'on_error={on_error!r}: "raise" ends the run, "log" reports and goes on')
    if disable_after is None:
        return
    if isinstance(disable_after, bool) or not isinstance(disable_after, int) or disable_after < 1:
        raise SubscribeError(f"disable_after={disable_after!r}: give the number of errors after which to retire it")
    if on_error == "raise":
        raise SubscribeError('disable_after= needs on_error="log": with "raise" the first error ends the run')
