"""Filters select the events of a subscription. An event must pass all filters.

``every``, ``once``, ``after`` and ``before`` compare the event's *count* ``v``, which starts at 1 and comes from the progress
of the run, so that it survives a resume:

=================================  ==========================================================
events                             v
=================================  ==========================================================
training iterations                ``iter + 1`` (micro-batches since the run began)
training epochs                    ``epoch + 1``
optimizer steps                    ``update + 1``
validation and test iterations     ``batch_idx + 1`` (within this validation)
validation and test as a whole     number of this validation (test) in the run
all others                         publishes so far; saved with the run
=================================  ==========================================================

``every=n`` fires at n, 2n, 3n …; with ``after=a`` it counts from there: at a + n, a + 2n … (not at once: a + 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from trainbus.eventloop.checks import check_picks, check_value
from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import Counter
from trainbus.eventloop.seams import CLOCK

COUNTS: dict[Counter, str] = {
    "iter": "event.progress.iter + 1",
    "epoch": "event.progress.epoch + 1",
    "update": "event.progress.update + 1",
    "batch": "event.progress.batch_idx + 1",
    "validation": "event.progress.validation + 1",
    "publish": "count()",
}
"""Source of the expression that yields v, by an event's ``counts``."""


class Filter(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The filter of one subscription; made by :func:`make_filter`."""

    every: int | None = None
    once: frozenset[int] | None = None
    after: int | None = None
    before: int | None = None
    when: Callable[[Any], object] | None = None
    every_seconds: float | None = None
    due: Callable[[], bool] | None = None  # kept here, because a route is recompiled when a subscription changes

    @property
    def counted(self) -> bool:
        """True if the filter compares the event's count."""
        return any(limit is not None for limit in (self.every, self.once, self.after, self.before))

    def terms(self, suffix: str) -> tuple[list[str], dict[str, Any]]:
        """Return the Python terms (of ``v`` and ``event``) that must all hold, cheapest first, and the objects they name.

        ``suffix`` makes the names of these objects unique in a compiled route.
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
            terms.append(f"(got := _when_{suffix}(event)) and (got is True or check(got))")  # a coroutine is true, too
        if self.due is not None:
            # Last, because the call starts the next interval: call it only if all other terms hold.
            bound[f"_due_{suffix}"] = self.due
            terms.append(f"_due_{suffix}()")
        return terms, bound

    def __str__(self) -> str:
        shown: dict[str, Any] = {"every": self.every, "after": self.after, "before": self.before}
        if self.once is not None:
            shown["once"] = sorted(self.once) if len(self.once) > 1 else next(iter(self.once))
        if self.when is not None:
            name = getattr(self.when, "__qualname__", repr(self.when))
            if not name.startswith("_"):  # else it is a condition of the hook's own, which users cannot set
                shown["when"] = name
        seconds = [] if self.every_seconds is None else [f"every {self.every_seconds:g}s"]
        return " ".join([*(f"{name}={value}" for name, value in shown.items() if value is not None), *seconds])


def make_filter(events: Iterable[type[Event]], options: Mapping[str, Any]) -> Filter | None:
    """Return the filter for these options, or None; raise SubscribeError if it can never fire on these events."""
    once, when, seconds = (options.get(name) for name in ("once", "when", "every_seconds"))
    if when is not None:
        check_picks("when", when, "a truth value")
    every = options.get("every")
    made = Filter(
        every=None if every == 1 else every,  # every=1 and after=0 pass all events
        after=options.get("after") or None,
        once=None if once is None else _counts(once),
        before=options.get("before"),
        when=when,
        every_seconds=seconds,
        due=None if seconds is None else _interval(seconds),
    )
    _check_can_fire(made)
    for event in events if made.counted else ():
        if event.counts != "publish" and "progress" not in event.__struct_fields__:
            raise SubscribeError(
                f"{event.__name__}.counts is {event.counts!r}, but the event has no field `progress: Progress` to count by; "
                "add it or leave `counts` out to count its publishes"
            )
    return made if made.counted or when is not None or seconds is not None else None


def _counts(once: int | Iterable[int]) -> frozenset[int]:
    values = frozenset(once if isinstance(once, Iterable) else [once])
    if not values:
        raise SubscribeError("once=[]: an empty list never fires; leave `once` out or name at least one count")
    for value in values:
        check_value("once", value, Annotated[int, msgspec.Meta(ge=1)], SubscribeError)
    return values


def _interval(seconds: float) -> Callable[[], bool]:
    """Return a function that returns True at most once per ``seconds``, and at its first call."""
    due, clock = float("-inf"), CLOCK.value

    def ask() -> bool:
        nonlocal due
        now = clock()
        if now < due:
            return False
        due = now + seconds
        return True

    return ask


def _check_can_fire(made: Filter) -> None:
    after = made.after or 0
    if made.once is not None:
        fires = [v for v in made.once if after < v < (made.before or v + 1) and (v - after) % (made.every or 1) == 0]
        possible = bool(fires)
    else:
        possible = made.before is None or after + (made.every or 1) < made.before
    if not possible:
        raise SubscribeError(f"the filter ({made}) can never fire: counts start at 1, and `every` counts from `after`")
