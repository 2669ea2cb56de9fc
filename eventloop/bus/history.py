"""``History``: keep the last events of some mount points, for streams that replay them.

It is the handler of one subscription. So each event is filtered and copied once, kept, and passed to the lane of each stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from eventloop.checks import check_picks
from eventloop.offload import Lane, capture, detacher

Picks = Callable[[Any], Any]


class History:
    """Keep the last events, and pass each one to the streams.

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
        self._make_item = detacher() if picks is None else _capturer(picks)
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


def _capturer(picks: Picks) -> Callable[[Any], Any]:
    def capture_event(event: Any) -> Any:
        return msgspec.structs.replace(capture(picks(event)), source=(type(event), getattr(event, "progress", None)))

    return capture_event
