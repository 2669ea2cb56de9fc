"""The lanes of a hook: one consumer takes their events in the order in which they were published.

A lane keeps its own bound, policy and counts. Its items carry numbers of a counter that the lanes share. The consumer draws a
number before it looks at the lanes, and takes smaller ones only: what a thread published before, to any of the lanes, had a
smaller number and is in its lane already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import count
from operator import itemgetter

from trainbus.eventloop.offload.drain import Deadline
from trainbus.eventloop.offload.lane import Lane, Mark


class OrderedLanes:
    """Several lanes with one consumer. It has the methods of a lane by which a consumer looks again, sleeps and ends."""

    def __init__(self, lanes: Sequence[Lane], number: Callable[[], int]) -> None:
        self._lanes = lanes
        self._number = number

    def oldest(self) -> tuple[Lane, int] | None:
        """Return the lane with the oldest event, and the number below which its events come first; None if all are empty."""
        while True:
            limit = self._number()
            heads = [(number, lane) for lane in self._lanes if (number := lane.first()) is not None]
            if not heads:
                return None
            number, lane = min(heads, key=itemgetter(0))
            if number < limit:  # else it was published meanwhile, and perhaps another before it
                return lane, min([limit, *(other for other, one in heads if one is not lane)])

    @property
    def linger(self) -> float:
        """The seconds after which the consumer looks again."""
        return min(lane.linger for lane in self._lanes)

    @property
    def ending(self) -> bool:
        """True once all lanes are closed or retired."""
        return all(lane.ending for lane in self._lanes)

    def begin_lingering(self) -> None:
        """Have a publisher wake the consumer early if half of a lane fills up."""
        for lane in self._lanes:
            lane.begin_lingering()

    def disarm(self) -> bool:
        """Announce that the consumer is about to sleep; False if an item came in meanwhile and it must not."""
        return False not in [lane.disarm() for lane in self._lanes]  # all of them

    def finished(self) -> bool:
        """Return True if all lanes are ending and empty."""
        return all(lane.finished() for lane in self._lanes)


class HookLanes:
    """The lanes of a hook's offloaded methods on one bus, of all modes. Those of one mode have one consumer.

    Args:
        label: name of the hook.
        lanes: the lanes of each mode.
    """

    def __init__(self, label: str, lanes: Collection[Sequence[Lane]]) -> None:
        self.label = label
        self.number: Callable[[], int] = count().__next__
        self._lanes = [lane for together in lanes for lane in together]
        for together in lanes:
            for lane in together if len(together) > 1 else ():
                lane.number, lane.contextual = self.number, False

    def marks(self, lane: Lane, deadline: Deadline) -> tuple[Mark, ...]:
        """Return marks of the other lanes, for an event that goes into ``lane`` and comes behind theirs."""
        return tuple([Mark(one, deadline) for one in self._lanes if one is not lane and one.served])

    def pending(self) -> Counter[str]:
        """Return the number of events that are not done, by lane."""
        return +Counter({lane.label: lane.stats.pending for lane in self._lanes if lane.served})

    def wait(self, deadline: Deadline, interrupt: Callable[[], object]) -> bool:
        """Wait until all events that were published before are done; return False if ``deadline`` came first.

        ``interrupt`` is called now and then, and may raise an error.
        """
        marks = [Mark(lane, deadline) for lane in self._lanes]
        return False not in [mark.synchronize(interrupt) for mark in marks]  # for all of them
