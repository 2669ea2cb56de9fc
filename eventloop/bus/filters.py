"""Filters decide which events a subscription hears. They combine: all must agree.

``every``, ``once``, ``after`` and ``before`` compare the event's *count* ``v``, which starts at 1 and comes from the progress
of the run, so that it survives a resume:

=================================  ==========================================================
events                             v
=================================  ==========================================================
training iterations                ``iter + 1`` (micro-batches since the run began)
training epochs                    ``epoch + 1``
optimizer steps                    ``update + 1``
validation and test iterations     ``batch_idx + 1`` (within this validation)
validation and test as a whole     the how-manieth validation (test) of the run this is
all others                         publishes heard so far; saved with the run
=================================  ==========================================================

``every=n`` fires at n, 2n, 3n …; with ``after=a`` it counts from there: at a + n, a + 2n … (Ignite's ``every`` with ``after``
begins at once: a + 1, a + 1 + n …)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from eventloop.callables import check_picks
from eventloop.errors import SubscribeError
from eventloop.events import Event
from eventloop.events.event import Counter

COUNTS: dict[Counter, str] = {
    "iter": "event.progress.iter + 1",
    "epoch": "event.progress.epoch + 1",
    "update": "event.progress.update + 1",
    "batch": "event.progress.batch_idx + 1",
    "validation": "event.progress.validation + 1",
    "publish": "count()",
}
"""Source of the expression that yields v, by an event's ``counts``."""


class Interval:
    """Says yes at most once per ``seconds``; the first time it is asked it says yes."""

    __slots__ = ("_next", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._next = float("-inf")

    def due(self) -> bool:
        """Return True, and begin the next interval, if the present one is over."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.seconds
        return True


class Filter(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The validated filter of one subscription; built by :func:`make_filter`."""

    every: int | None = None
    once: frozenset[int] | None = None
    after: int | None = None
    before: int | None = None
    when: Callable[[Any], object] | None = None
    interval: Interval | None = None  # the subscription's own: routes are compiled anew whenever somebody subscribes

    @property
    def counted(self) -> bool:
        """True if the filter compares the event's count."""
        return any(limit is not None for limit in (self.every, self.once, self.after, self.before))

    def terms(self, suffix: str) -> tuple[list[str], dict[str, Any]]:
        """Return the Python terms (of ``v`` and ``event``) that must all hold, cheapest first, and the objects they name.

        Args:
            suffix: makes the names of those objects unique within one compiled route.
        """
        terms: list[str] = []
        bound: dict[str, Any] = {}
        if self.after is not None:
            terms.append(f"v > {self.after}")
        if self.before is not None:
            terms.append(f"v < {self.before}")
        if self.every is not None:
            terms.append(f"(v - {self.after}) % {self.every} == 0" if self.after else f"v % {self.every} == 0")
        if self.once is not None:
            counts = ", ".join(map(str, sorted(self.once)))
            terms.append(f"v == {counts}" if len(self.once) == 1 else f"v in {{{counts}}}")
        if self.when is not None:
            bound[f"_when_{suffix}"] = self.when
            terms.append(f"_when_{suffix}(event)")
        if self.interval is not None:
            # Last, because asking starts the next interval: it must only be asked when all else agrees.
            bound[f"_due_{suffix}"] = self.interval.due
            terms.append(f"_due_{suffix}()")
        return terms, bound

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in ("every", "after", "before") if getattr(self, name) is not None]
        if self.once is not None:
            parts.append(f"once={sorted(self.once) if len(self.once) > 1 else next(iter(self.once))}")
        if self.when is not None:
            parts.append(f"when={getattr(self.when, '__qualname__', repr(self.when))}")
        if self.interval is not None:
            parts.append(f"every {self.interval.seconds:g}s")
        return " ".join(parts)


FILTERS = ("every", "once", "after", "before", "when", "every_seconds")


def make_filter(
    *,
    every: int | None = None,
    once: int | Iterable[int] | None = None,
    after: int | None = None,
    before: int | None = None,
    when: Callable[[Any], object] | None = None,
    every_seconds: float | None = None,
) -> Filter | None:
    """Check filter options and return them as a :class:`Filter`, or None where nothing is filtered.

    Raises:
        SubscribeError: a non-positive or non-integer count, a predicate that cannot be called, or a combination that can
            never fire.
    """
    if every is not None:
        _check_int("every", every, least=1)
    if after is not None:
        _check_int("after", after, least=0)
    if before is not None:
        _check_int("before", before, least=1)
    if when is not None:
        _check_when(when)
    _check_seconds(every_seconds)
    filter_ = Filter(
        every=None if every == 1 else every,  # these two always agree, and need no code
        once=None if once is None else _check_once(once),
        after=after or None,
        before=before,
        when=when,
        interval=None if every_seconds is None else Interval(every_seconds),
    )
    _check_can_fire(filter_)
    return filter_ if filter_.counted or when is not None or every_seconds is not None else None


def count_of(event: type[Event]) -> str:
    """Return the source of the expression that counts ``event``."""
    return COUNTS[event.counts]


def _check_int(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SubscribeError(f"{name}={value!r}: counts are integers, not {type(value).__name__}")
    if value < least:
        raise SubscribeError(f"{name}={value}: counts start at 1, so {name} must be at least {least}")


def _check_when(when: object) -> None:
    if not callable(when):
        raise SubscribeError(f"when={when!r}: a predicate takes the event and returns a truth value")
    check_picks("when", when, "a truth value")


def _check_seconds(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise SubscribeError(f"every_seconds={value!r}: give a positive number of seconds")


def _check_once(once: int | Iterable[int]) -> frozenset[int]:
    if not isinstance(once, Iterable):
        once = [once]
    values = frozenset(once)
    if not values:
        raise SubscribeError("once=[]: an empty list never fires; leave `once` out or name at least one count")
    for value in values:
        _check_int("once", value, least=1)
    return values


def _check_can_fire(filter_: Filter) -> None:
    after = filter_.after or 0
    if filter_.once is not None:
        fires = [v for v in filter_.once if after < v < (filter_.before or v + 1) and (v - after) % (filter_.every or 1) == 0]
        possible = bool(fires)
    else:
        possible = filter_.before is None or after + (filter_.every or 1) < filter_.before
    if not possible:
        raise SubscribeError(f"the filter ({filter_}) can never fire: counts start at 1, and `every` counts from `after`")
