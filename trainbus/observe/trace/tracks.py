"""Build the tracks of a trace from the spans of a window: slices that are nested or disjoint, and arrows between them.

The training thread, each lane, each worker process and each other publishing thread has a track. Async handlers share the
thread of their event loop and overlap on it, so a lane has a separate track instead of a part of its thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainbus.eventloop.measure.spans import BEGIN, END, NAME, THREAD, Spans
from trainbus.observe.account import BETWEEN, WITHIN, pairs
from trainbus.observe.bus_recorder import Call, ForeignCall, LaneSpan

ITERATION: Final = ("before_train_iter", "after_train_iter")
WAITING: Final = "waiting for data"
GAP: Final = 10  # nanoseconds between the ends of slices
REQUESTING: Final = "requesting checkpoints"
COPYING: Final = "copying for checkpoints"
WRITING: Final = "writing checkpoints"
_STAGED: Final = "checkpoint_staged"
_COMMITTED: Final = "checkpoint_committed"


class Slice(NamedTuple):
    """A piece of work; times are nanoseconds of ``perf_counter_ns``."""

    begin: int
    end: int
    name: str
    kind: str


class Track(NamedTuple):
    """The work of one thread, lane or worker process: slices in order of their begin, nested or disjoint."""

    name: str
    slices: list[Slice]


class Arrow(NamedTuple):
    """An arrow from a moment in a slice of one track to a moment in a slice of another; tracks by index."""

    name: str
    source: int
    at: int
    target: int
    until: int


class Counter(NamedTuple):
    """Values of a number by time."""

    name: str
    unit: str
    values: list[tuple[int, int]]


class Window(NamedTuple):
    """The recorded data of a window of a run, and the names of the spans by id."""

    spans: Spans
    names: Sequence[Any]
    pauses: Sequence[tuple[int, int, int, int]]  # garbage collections: thread, begin, end, generation
    threads: Mapping[int, str]  # names of threads
    training: int  # the thread that trains
    first: int  # the number of the first iteration
    begin: int
    iterations: int


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """Return slices in order of their begin, with ``GAP`` between the ends of nested and adjacent slices.

    Spans of one thread are nested or disjoint by nature, but some begin where another ends. Viewers round times and then drop
    slices that partly overlap. A slice that would end after its enclosing slice, as after a loss of spans, is shortened. An
    empty slice is left out.
    """
    made: list[Slice] = []
    around: list[int] = []  # ends of the enclosing slices
    free: int | None = None  # earliest begin of the next slice
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        while around and around[-1] <= one.begin:
            free = around.pop() + GAP
        begin = one.begin if free is None else max(one.begin, free)
        end = min(one.end, around[-1] - GAP) if around else one.end
        if begin < end:
            around.append(end)
            free = begin + GAP
            made.append(one._replace(begin=begin, end=end))
    return made


class Tracks:
    """The tracks and arrows of a window. The training thread's track comes first.

    ``rest`` is called regularly, so that other threads can run.
    """

    def __init__(self, window: Window, rest: Callable[[], object]) -> None:
        self._window = window
        self._rest = rest
        self.tracks: list[Track] = []
        self.arrows: list[Arrow] = []
        self._indices: dict[Any, int] = {}
        self._ids = {name: number for number, name in enumerate(window.names)}
        spans = window.spans[window.spans[:, END] >= window.begin]
        self._spans = spans[np.argsort(spans[:, BEGIN], kind="stable")]
        self.end = self._end()  # the end of the last iteration of the window
        self._index("training", "training")
        self._writes = self._writes_of_window()
        self._add_lanes()
        self._add_threads()
        self._add_training()
        begin = min((window.begin, *(one.begin for one in self.tracks[0].slices)))
        for track in self.tracks:
            track.slices[:] = nested(one._replace(begin=max(one.begin, begin)) for one in track.slices)
            rest()
        self._add_deliveries()
        self._add_commits()

    def _end(self) -> int:
        """Return the end of the last iteration, or the end of the last span if the run ended within the window."""
        own = self._spans[self._spans[:, THREAD] == self._window.training]
        ends = np.sort(own[(own[:, NAME] == self._ids.get(ITERATION[1], -1)) & (own[:, BEGIN] >= self._window.begin), END])
        if len(ends) >= self._window.iterations:
            return int(ends[self._window.iterations - 1])
        return int(own[:, END].max(initial=self._window.begin))

    def _index(self, key: Any, name: str) -> int:
        if key not in self._indices:
            self._indices[key] = len(self.tracks)
            self.tracks.append(Track(name, []))
        return self._indices[key]

    def _of(self, kind: str) -> dict[Any, Spans]:
        """Return the spans of a kind by subscription, in order of their begin."""
        lanes = ((number, name) for number, name in enumerate(self._window.names) if isinstance(name, LaneSpan))
        numbers = {name.subscription: number for number, name in lanes if name.kind == kind}
        found = {one: self._spans[self._spans[:, NAME] == number] for one, number in numbers.items()}
        return {one: spans for one, spans in found.items() if len(spans)}

    def _add_lanes(self) -> None:
        """Add the calls of offloaded handlers that began in the window, or whose event was published in it."""
        self._calls: dict[int, list[tuple[int, int, int]]] = {}  # by thread: begin and end, and the lane's track
        queued, worked = self._of("queued"), self._of("worked")
        for one, calls in self._of("handled").items():
            calls = calls[: self._number(calls, queued.get(one))]
            if not len(calls):
                continue
            index = self._index(one, one.label)
            self._add(index, calls, one.label, "handler")
            if one.mode != "async":
                for thread, begin, end in calls[:, [THREAD, BEGIN, END]].tolist():
                    self._calls.setdefault(thread, []).append((begin, end, index))
            if one in worked:
                self._add_workers(one, worked[one][worked[one][:, END] <= calls[:, END].max()])
        for own in self._calls.values():
            own.sort()  # the lanes of a hook share a thread

    def _number(self, calls: Spans, queued: Spans | None) -> int:
        """Return the number of a lane's calls that belong to the window."""
        number = int(np.searchsorted(calls[:, BEGIN], self.end, side="right"))
        arrived = queued[queued[:, BEGIN] <= self.end, END] if queued is not None else ()
        if len(arrived):  # a call begins when its last event has arrived
            number = max(number, int(np.searchsorted(calls[:, BEGIN], max(arrived))) + 1)
        return number

    def _add_workers(self, one: Any, calls: Spans) -> None:
        for process in np.unique(calls[:, THREAD]).tolist():
            index = self._index((one, process), f"process {process} of {one.label}")
            self._add(index, calls[calls[:, THREAD] == process], one.label, "handler")

    def _add_threads(self) -> None:
        """Add events and inline handlers, each to the track of its thread or its lane, and the pauses of the collector."""
        begin, training = self._window.begin, self._window.training
        for number in np.unique(self._spans[:, NAME]).tolist():
            name = self._window.names[number]
            if isinstance(name, str | Call | ForeignCall):
                own = self._spans[self._spans[:, NAME] == number]
                own = own[(own[:, THREAD] != training) | (own[:, END] <= self.end)]
                title, kind = _titled(name)
                for thread, start, end in own[:, [THREAD, BEGIN, END]].tolist():
                    self._put(thread, Slice(start, end, title, kind))
                self._rest()
        for thread, start, end, generation in self._window.pauses:
            if start >= begin and end <= self.end:
                self._put(thread, Slice(start, end, f"garbage collection, generation {generation}", "memory"))

    def _put(self, thread: int, one: Slice) -> None:
        lane = self._lane_at(thread, one.begin)
        if thread == self._window.training:
            self.tracks[0].slices.append(one)
        elif lane is not None and (one.begin <= self.end or one.end <= lane[1]):
            self.tracks[lane[2]].slices.append(one)
        elif lane is None and (one.begin <= self.end or self._is_in_write(thread, one.begin)):
            self.tracks[self._index(thread, self._window.threads.get(thread, f"thread {thread}"))].slices.append(one)

    def _writes_of_window(self) -> Spans:
        """Return the writes of the checkpoints whose copies were handed over in the window; the last ones end after it."""
        training, writes = self._window.training, self._spans[self._spans[:, NAME] == self._ids.get(WRITING, -1)]
        staged = self._at(
            self._spans[(self._spans[:, THREAD] == training) & (self._spans[:, END] <= self.end)], (_STAGED,), BEGIN
        )
        found = np.searchsorted(writes[:, BEGIN], staged)
        mine: Spans = writes[np.unique(found[found < len(writes)])]
        return mine

    def _is_in_write(self, thread: int, at: int) -> bool:
        return any(one[THREAD] == thread and one[BEGIN] <= at <= one[END] for one in self._writes)

    def _lane_at(self, thread: int, at: int) -> tuple[int, int, int] | None:
        """Return begin, end and track of the last call of a lane's handler that a thread has begun before a moment."""
        # A new thread may reuse the id of a lane thread that has ended.
        return next((call for call in reversed(self._calls.get(thread, ())) if call[0] <= at), None)

    def _add(self, index: int, spans: Spans, name: str, kind: str) -> None:
        self.tracks[index].slices.extend(Slice(begin, end, name, kind) for begin, end in spans[:, [BEGIN, END]].tolist())

    def _add_training(self) -> None:
        """Add what lies between the mount points of the training thread."""
        own = self._spans[(self._spans[:, THREAD] == self._window.training) & (self._spans[:, END] <= self.end)]
        slices = self.tracks[0].slices
        for number, (begin, end) in enumerate(_between(self._at(own, ITERATION[:1], BEGIN), self._at(own, ITERATION[1:], END))):
            slices.append(Slice(begin, end, f"iteration {self._window.first + number}", "training"))
        ends = np.sort(own[:, END])
        for first, following, part in (*BETWEEN, *WITHIN):
            for begin, end in _between(self._at(own, (first,), END), self._at(own, following, BEGIN)):
                if part == WAITING:  # the wait comes after all else that happens between two iterations
                    begin = int(ends[np.searchsorted(ends, end, side="right") - 1])
                if begin < end:
                    slices.append(Slice(begin, end, part, "training"))

    def _at(self, spans: Spans, names: Iterable[str], which: int) -> NDArray[np.int64]:
        numbers = [self._ids[name] for name in names if name in self._ids]
        return np.sort(spans[np.isin(spans[:, NAME], numbers), which])

    def _add_deliveries(self) -> None:
        """Add an arrow for each event from its hand-off to the call of its handler."""
        handled = self._of("handled")
        hand_offs = self._hand_offs()
        for one, events in self._of("queued").items():
            if one not in self._indices or one not in hand_offs or one not in handled:
                continue
            begins, sources = hand_offs[one], handled[one][:, BEGIN]
            for at, arrived in events[:, [BEGIN, END]].tolist():
                found, call = np.searchsorted(begins[:, BEGIN], at, side="right") - 1, np.searchsorted(sources, arrived)
                if found < 0 or call == len(sources) or begins[found, END] < at:
                    continue
                source = self._track_of(int(begins[found, THREAD]), at)
                if source is not None:
                    self.arrows.append(Arrow("delivery", source, at, self._indices[one], int(sources[call])))
            self._rest()

    def _hand_offs(self) -> dict[Any, Spans]:
        """Return the hand-offs to lanes in the window by subscription, in order of their begin."""
        numbers: dict[Any, list[int]] = {}
        for number, name in enumerate(self._window.names):
            if isinstance(name, Call) and name.subscription.lane is not None:
                numbers.setdefault(name.subscription, []).append(number)
        in_window = self._spans[(self._spans[:, END] <= self.end) & (self._spans[:, BEGIN] >= self._window.begin)]
        return {one: in_window[np.isin(in_window[:, NAME], own)] for one, own in numbers.items()}

    def _track_of(self, thread: int, at: int) -> int | None:
        if thread == self._window.training:
            return 0
        lane = self._lane_at(thread, at)
        return self._indices.get(thread) if lane is None else lane[2]

    def _add_commits(self) -> None:
        """Add arrows for each checkpoint, from the requests and the copy of its state to its commit."""
        found: dict[str, list[Slice]] = {}
        for one in self.tracks[0].slices:
            found.setdefault(one.name, []).append(one)
        before = 0
        for copy in found.get(COPYING, ()):
            commit = self._commit(copy.end)
            asked = [one for one in found.get(REQUESTING, ()) if before <= one.begin < copy.begin]
            before = copy.begin
            if commit is not None:
                self.arrows += [Arrow("checkpoint", 0, one.begin, *commit) for one in asked or [copy]]

    def _commit(self, copied: int) -> tuple[int, int] | None:
        """Return the track and the begin of the commit of the checkpoint whose copy was complete at a moment."""
        write = next((one for one in self._writes if one[BEGIN] >= copied), None)
        index = None if write is None else self._indices.get(int(write[THREAD]))
        if write is None or index is None:
            return None
        commits = (one.begin for one in self.tracks[index].slices if one.name == _COMMITTED)
        return next(((index, begin) for begin in commits if write[BEGIN] <= begin <= write[END]), None)


def _titled(name: str | Call | ForeignCall) -> tuple[str, str]:
    if isinstance(name, str):
        return name, "event"
    if isinstance(name, ForeignCall):
        return name.label, "hook"
    label = name.subscription.label
    return (label, "hook") if name.subscription.lane is None else (f"hand-off to {label}", "hand-off")


def _between(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int]]:
    begins, ends, _ = pairs(begins, ends)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
