"""What the consumers of lanes have in common: one daemon thread for a blocking handler, one task for an async one.

Both do the same: take what is there and deliver it; look again after ``linger``; sleep after an empty look. They end when
their lane is closed or retired and empty, and start again when rung for what was published just before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from itertools import zip_longest
from typing import Any, NamedTuple

import anyio

from eventloop.events import Event
from eventloop.offload.lane import Lane
from eventloop.offload.reports import LaneStats
from eventloop.offload.snapshot import Snapshot

_COPY_POLL = 0.0005  # seconds between looks at a copy from a GPU; waiting for it would block the loop


Sources = list[tuple[type[Event], Any]]
"""Kind and progress of events, as far as they are known."""


class Delivery(NamedTuple):
    """What is delivered, to whom, and who hears how it went."""

    lane: Lane
    handler: Callable[[Any], Any]
    """Gets one item of the lane, or with ``batch`` a list of them."""
    failed: Callable[[Exception, Sources], None]
    """Told of every exception of the handler, and of which events it had, before it is counted."""
    broken: Callable[[BaseException, Sources], None]
    """Told of what ended the consumer (``SystemExit`` raised by a handler, say); it delivers nothing any more."""
    batch: int | None = None
    """Most items per call."""
    loud: bool = True
    """Whether it is an error that items are left when the bus closes; else that is logged."""
    began: Callable[[Consumer], None] = lambda _: None
    """Told by a consumer that starts, or starts again."""
    ended: Callable[[Consumer], None] = lambda _: None
    """Told by a consumer that ends because its lane is finished."""


class Consumer:
    """Counts what it has in hand, and tells how it went."""

    def __init__(self, delivery: Delivery) -> None:
        self.lane, self._handler, self._failed, self._broken, self._batch, self.loud, self._began, self._ended = delivery
        self.before: LaneStats = self.lane.stats  # what the lane had counted before this bus session, or when last reported
        self._most = self._batch or self.lane.chunk
        self._ended_at: Sources = []
        self._held = 0  # items that were taken and are not accounted for yet

    def abandon(self, *, now: bool) -> None:
        """Deliver nothing more after the item in progress; with ``now`` the bus has no patience left."""
        raise NotImplementedError

    def _take(self) -> list[Any]:
        items = self.lane.take(self._most)
        self._held = len(items)
        if self.lane.given_up:
            self._drop_held()
            return []
        return items

    def _calls(self, items: list[Any]) -> Iterator[tuple[Context, list[Any]]]:
        """Split what was taken into calls of the handler: the context variables it sees, and what it gets."""
        if self._batch is not None:
            yield self.lane.context.copy(), items
            return
        for item in items:
            context, value = item if self.lane.contextual else (self.lane.context.copy(), item)
            yield context, [value]

    def _done(self, number: int) -> None:
        self._held -= number
        self.lane.delivered(number)

    def _count_failed(self, number: int) -> None:
        self._held -= number
        self.lane.failed(number)

    def _fail(self, error: Exception, items: list[Any], arrived: list[Any]) -> None:
        # Told before it is counted: a drain that saw the count must find the error.
        self._failed(error, sources(items, arrived))
        self._count_failed(len(items))

    def _fail_and_end(self, items: list[Any], arrived: list[Any]) -> None:
        """Count the events of a call that ends the consumer, which is told by :meth:`_break`."""
        self._ended_at = sources(items, arrived)
        self._count_failed(len(items))

    def _break(self, error: BaseException) -> None:
        self._drop_held()
        self._broken(error, self._ended_at)
        self.lane.close(f"its consumer has ended: {type(error).__name__}: {error}")
        self.lane.detach()

    def _drop_held(self) -> None:
        self.lane.dropped(self._held)
        self._held = 0


def sources(items: list[Any], arrived: list[Any]) -> Sources:
    """Return of which events ``items`` of a lane are, which are ``arrived`` as far as they got."""
    found: Sources = []
    for item, value in zip_longest(items, arrived):
        if isinstance(item, Snapshot) and item.source is not None:
            found.append(item.source)
        elif isinstance(value, Event):
            found.append((type(value), getattr(value, "progress", None)))
    return found


async def copied(item: Any) -> None:
    """Wait until ``item`` has arrived from its device."""
    while isinstance(item, Snapshot) and not item.ready:  # noqa: ASYNC110 - a GPU sets no event of ours
        await anyio.sleep(_COPY_POLL)


def arrive(item: Any) -> Any:
    """Return what the handler gets of an item of its lane."""
    return item.resolve() if isinstance(item, Snapshot) else item
