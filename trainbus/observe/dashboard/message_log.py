"""``MessageLog``: the numbered messages of one run, in bounded memory. Each reader starts at the beginning, at its own speed.

Writers never wait for readers and never wake them, because readers poll. So writing costs the same with 200 readers as with
none.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from trainbus.eventloop.plain import as_json
from trainbus.observe.curves import extremes

_MOST_POINTS: Final = 4000  # of one scalar
_MOST_NOTES: Final = 2000
_MOST_NAMES: Final = 64  # most names of scalars; further names are dropped, because events may bring any number of them


class Point(NamedTuple):
    """The scalars of one training iteration that are kept."""

    number: int
    iter: int
    epoch: int
    time: float
    values: Mapping[str, float]


class _Message(NamedTuple):
    """A server-sent event. An event with points has the numbers of all of them."""

    first: int
    last: int
    kind: str
    data: bytes
    points: Sequence[Point] = ()


class MessageLog:
    """The messages of one run. Every method may be called from any thread.

    - Of a scalar with more than 4,000 points, each ``width`` iterations keep their extremes: the fewer, the longer the run.
    - Messages with ``replace=True``: the last of each kind is kept. After the last message, one is replaced in its place, for
      the readers to come.
    - Of the other messages, the oldest go when there are more than 2,000 in all; the first one stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[_Message] = []
        self._names: set[str] = set()
        self._replaced: set[str] = set()  # kinds of messages
        self._width = 1
        self._counts: Counter[str] = Counter()
        self.number = 0  # number of the last message or point
        self.over = False  # True after the last message

    def post(self, kind: str, data: Mapping[str, Any], *, replace: bool = False, last: bool = False) -> None:
        """Add a message. After the last one, readers leave, and no message is added."""
        with self._lock:
            if self.over:
                if replace:
                    self._messages = [
                        _encoded(one.first, one.last, kind, data) if one.kind == kind else one for one in self._messages
                    ]
                return
            if replace:
                self._replaced.add(kind)
                self._messages = [one for one in self._messages if one.kind != kind]
            self.number += 1
            self._messages.append(_encoded(self.number, self.number, kind, data))
            self._drop_notes()
            self.over = last

    def add(self, points: Iterable[tuple[int, int, float, Mapping[str, Any]]]) -> None:
        """Add the scalars of iterations: (iteration from 1, epoch from 1, Unix time, values by name)."""
        with self._lock:
            if self.over:
                return
            new = [
                Point(self.number + index, iteration, epoch, time, self._known(values))
                for index, (iteration, epoch, time, values) in enumerate(points, 1)
            ]
            if new:
                self.number = new[-1].number
                self._messages.append(_scalars(new, self._width))
                for point in new:
                    self._counts.update(point.values.keys())
                if max(self._counts.values(), default=0) > _MOST_POINTS:
                    self._thin()

    def read(self, seen: int = 0) -> tuple[list[bytes], int, bool]:
        """Return the messages after number ``seen`` as server-sent events, the last number, and whether it was the last one."""
        with self._lock:
            start = bisect_right(self._messages, seen, key=lambda one: one.last)
            messages, number, over, width = self._messages[start:], self.number, self.over, self._width
        bodies = [
            one.data
            if one.first > seen or not one.points
            else _scalars([point for point in one.points if point.number > seen], width).data
            for one in messages
        ]
        return bodies, number, over

    def points(self) -> list[Point]:
        """Return the points that are kept, in their order."""
        with self._lock:
            return [point for one in self._messages for point in one.points]

    def _known(self, values: Mapping[str, Any]) -> dict[str, float]:
        known: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, str) or not (name in self._names or len(self._names) < _MOST_NAMES):
                continue
            self._names.add(name)
            known[name] = float(value)
        return known

    def _thin(self) -> None:
        """Keep the extremes of each bin. Widen the bins until no scalar has more than half of the points."""
        points = [point for one in self._messages for point in one.points]
        kept: dict[int, dict[str, float]] = {}
        while not kept or max(self._counts.values()) > _MOST_POINTS / 2:
            self._width *= 2 if kept else 1
            kept, self._counts = {}, Counter()
            for name in self._names:
                own = [point for point in points if name in point.values]
                bins = np.array([point.iter // self._width for point in own], np.int64)
                chosen = extremes(bins, np.array([point.values[name] for point in own], np.float64))
                self._counts[name] = len(chosen)
                for point in map(own.__getitem__, chosen):
                    kept.setdefault(point.number, {})[name] = point.values[name]
        messages: list[_Message] = []
        for one in self._messages:
            left = [point._replace(values=kept[point.number]) for point in one.points if point.number in kept]
            if left and messages and messages[-1].points:
                left = [*messages.pop().points, *left]
            if left or not one.points:
                messages.append(_Message(left[0].number, left[-1].number, "scalars", b"", left) if left else one)
        self._messages = [_scalars(one.points, self._width) if one.points else one for one in messages]

    def _drop_notes(self) -> None:
        notes = sum(not one.points for one in self._messages)
        if notes > _MOST_NOTES:
            # Keep the first message, which identifies the run, and those that say how things are.
            kept = self._replaced
            oldest = next(index for index, one in enumerate(self._messages) if index and not (one.points or one.kind in kept))
            del self._messages[oldest]


def _scalars(points: Sequence[Point], width: int) -> _Message:
    """Return a message of points: ``at`` has the places of the values of a scalar that not all of the points have."""
    at: dict[str, list[int]] = {}
    for index, point in enumerate(points):
        for name in point.values:
            at.setdefault(name, []).append(index)
    columns = {
        "iter": [point.iter for point in points],
        "epoch": [point.epoch for point in points],
        "time": [point.time for point in points],
        "values": {name: [points[index].values[name] for index in own] for name, own in at.items()},
        "at": {name: own for name, own in at.items() if len(own) < len(points)},
        "width": width,
    }
    return _encoded(points[0].number, points[-1].number, "scalars", columns, points)


def _encoded(first: int, last: int, kind: str, data: Mapping[str, Any], points: Sequence[Point] = ()) -> _Message:
    # orjson writes NaN and infinities as null.
    text = as_json(data, str, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return _Message(first, last, kind, b"id: %d\nevent: %s\ndata: %s\n\n" % (last, kind.encode(), text), points)
