"""``Account``: split the time of a training thread into parts, from its spans. Each instant counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainbus.eventloop.measure.spans import BEGIN, END, FIELDS, NAME, Spans
from trainbus.eventloop.seams import Seam
from trainbus.observe.costs import BINS
from trainbus.observe.totals import Totals, at

Ints = NDArray[np.int64]

_ENDS: Final = ("after_run", "on_exception")
_EPOCH_ENDS: Final = ("after_train_epoch", "after_train", *_ENDS)
# A break or a stop ends a validation without its after_val.
_EVALUATION_ENDS: Final = ("before_train_epoch", "before_train_iter", "after_train_iter", *_EPOCH_ENDS)

BETWEEN: Final[Sequence[tuple[str, tuple[str, ...], str]]] = (
    ("before_val", ("after_val", *_EVALUATION_ENDS), "validation"),
    ("before_test", ("after_test", *_EVALUATION_ENDS), "test"),
    ("before_train_iter", ("after_train_iter", *_EPOCH_ENDS), "step"),
    ("after_train_iter", ("before_train_iter", *_EPOCH_ENDS), "waiting for data"),
    ("before_train_epoch", ("before_train_iter", *_EPOCH_ENDS), "waiting for data"),
    ("after_train_epoch", ("before_train_epoch", "after_train", *_ENDS), "between epochs"),
)
"""The parts between mount points: from the end of the first mount point to the begin of the next one in the tuple.

Validation may lie within the other parts, so it comes before them.
"""

WITHIN: Final[Sequence[tuple[str, tuple[str, ...], str]]] = (
    ("before_forward", ("after_forward",), "forward"),
    ("before_backward", ("after_backward",), "backward"),
    ("before_optimizer_step", ("after_optimizer_step",), "optimizer step"),
    ("before_save_checkpoint", ("checkpoint_staged",), "copying for checkpoints"),
)
"""The same, for parts that end before the next mount point of the list above."""

FIRST: Final = "before_run"
WAITING: Final = "waiting for checkpoints"
"""Name of the spans in which the run waits until a checkpoint is written; the last one comes after ``after_run``."""

_MARKS: Final = frozenset(name for first, following, _ in BETWEEN for name in (first, *following)) | {FIRST}
"""Mount points that only the run publishes, never a handler. At the end of one, all earlier spans are known."""

NEEDED: Final = _MARKS | {name for first, following, _ in WITHIN for name in (first, *following)}
"""The mount points whose spans are needed even without a subscriber."""

_ALSO_MARKS: Final = ("before_val_iter", "after_val_iter", "before_test_iter", "after_test_iter")
_STEP_BEGINS: Final = ("before_train_epoch", "after_train_iter", "after_val")
"""An iteration begins at the end of the last one of these."""
MOST_PENDING: Final = Seam(1 << 18)  # spans without a mark, about 10 MB
MOST_BETWEEN: Final = Seam(1 << 12)  # spans while no run is open, which may lie in the before_run of the next


class Account:
    """Add up the time of one thread by span name, from ``before_run`` to the last mount point of the run.

    Time between two runs is not counted. ``beside`` returns the ids of spans to leave out.
    """

    def __init__(self, id_of: Callable[[Hashable], int], beside: Callable[[], Sequence[int]]) -> None:
        self.wall = 0  # nanoseconds of all runs so far
        self.steps: Counter[int] = Counter()  # durations of iterations, as :class:`trainbus.observe.Durations` counts them
        self.stepped = 0  # the time of all iterations in ns
        self.calls = Totals()  # the calls in these runs, without the time of the spans within them
        self._beside = beside
        self._until: int | None = None  # counted up to here; None before the first run
        self._ended = False
        self._own: Ints = np.zeros(0, np.int64)
        self._pending: Spans = np.zeros((0, FIELDS), np.int64)
        self._open: set[int] = set()  # indices of BETWEEN
        self._last_step = 0
        self._first, self._waiting, self._iteration = id_of(FIRST), id_of(WAITING), id_of("after_train_iter")
        self._ends = [id_of(name) for name in _ENDS]
        self._step_begins = [id_of(name) for name in _STEP_BEGINS]
        self._marks = [id_of(name) for name in (*_MARKS, *_ALSO_MARKS)]
        self._between, self._within = (
            [(id_of(first), [id_of(name) for name in following], id_of(part)) for first, following, part in kinds]
            for kinds in (BETWEEN, WITHIN)
        )

    def spent(self, name: int) -> int:
        """Return the nanoseconds of a name, without the spans within it."""
        return at(self._own, name)

    def add(self, spans: Spans) -> None:
        """Add spans of this thread, in the order of their ends."""
        # compress() takes rows four times as fast as an index of booleans.
        counted = spans.compress(~among(spans[:, NAME], self._beside()), axis=0)
        pending = np.concatenate([self._pending, counted])
        for begin in np.sort(pending[pending[:, NAME] == self._first, BEGIN]):
            # Spans within before_run were noted before it.
            before = pending[:, BEGIN] < begin
            self._count(pending.compress(before, axis=0))
            pending = pending.compress(~before, axis=0)
            self._until, self._ended, self._last_step = int(begin), False, int(begin)
            self._open.clear()
        pending = self._count(pending)
        self._pending = pending if self._until is not None and not self._ended else pending[-MOST_BETWEEN.value :]

    def _count(self, pending: Spans) -> Spans:
        """Count spans up to the last mark, and return the others."""
        marks = np.sort(pending[:, END].compress(among(pending[:, NAME], self._marks)))
        self._ended = self._ended or bool(among(pending[:, NAME], self._ends).any())
        until = self._known_until(pending, marks)
        if self._until is None or until <= self._until:
            return pending
        known = pending[:, END] <= until
        window, rest = pending.compress(known, axis=0), pending.compress(~known, axis=0)
        found = _Found(window)
        self._count_steps(found)
        calls = len(window)
        window = np.concatenate([window, self._made(found, marks, until)])
        window[:, BEGIN] = np.maximum(window[:, BEGIN], self._until)
        counted = window[:, END] > window[:, BEGIN]
        calls = int(np.count_nonzero(counted[:calls]))
        window = window.compress(counted, axis=0)
        if len(window):
            exclusive_times = exclusive(window)
            self.calls.add(window[:calls, NAME], exclusive_times[:calls])
            own = np.bincount(window[:, NAME], exclusive_times).astype(np.int64)
            size = max(len(own), len(self._own))
            self._own = np.pad(self._own, (0, size - len(self._own))) + np.pad(own, (0, size - len(own)))
        self.wall += until - self._until
        self._until = until
        return rest

    def _known_until(self, pending: Spans, marks: Ints) -> int:
        until = int(marks[-1]) if len(marks) else 0
        if self._ended:
            until = max([until, *pending[pending[:, NAME] == self._waiting, END].tolist()])
        elif not len(marks) and len(pending) > MOST_PENDING.value:  # a step that publishes very many events
            until = int(pending[:, END].max())
        return until

    def _count_steps(self, found: _Found) -> None:
        begins = np.sort(np.append(found.times(self._step_begins, END), self._last_step))
        ends = found.times([self._iteration], END)
        taken = ends - begins[np.searchsorted(begins, ends) - 1]
        self.stepped += int(taken.sum())
        self.steps.update((np.log2(np.maximum(taken, 1)) * BINS).astype(np.int64).tolist())
        self._last_step = int(begins[-1])

    def _made(self, found: _Found, marks: Ints, until: int) -> Spans:
        """Return spans for the parts between mount points; keep the parts that are still open."""
        made: list[Spans] = []
        for index, (first, following, part) in enumerate(self._between):
            begins = found.times([first], END)
            if index in self._open and self._until is not None:
                begins = np.concatenate([[self._until], begins])
            begins, ends, still_open = pairs(begins, found.times(following, BEGIN))
            (self._open.discard if still_open is None else self._open.add)(index)
            made.append(_spans(part, begins, ends))
            if still_open is not None:
                made.append(_spans(part, np.array([still_open]), np.array([until])))
        for first, following, part in self._within:
            begins = found.times([first], END)
            begins, ends, _ = pairs(begins, found.times(following, BEGIN))
            limits = np.append(marks, until)[np.searchsorted(marks, begins, side="right")]
            made.append(_spans(part, begins[ends <= limits], ends[ends <= limits]))
        return np.concatenate(made)


class _Found:
    """Spans by the ids of their names."""

    def __init__(self, spans: Spans) -> None:
        names = spans[:, NAME].astype(np.int32)
        order = np.argsort(names, kind="stable")
        self._spans = spans.take(order, axis=0)
        self._limits = np.searchsorted(names[order], np.arange(names.max(initial=0) + 2)).tolist()

    def times(self, names: Sequence[int], which: int) -> Ints:
        """Return the begins or the ends of all spans with these names, sorted."""
        known = [name for name in names if name + 1 < len(self._limits)]
        found = [self._spans[self._limits[name] : self._limits[name + 1], which] for name in known]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def among(names: Ints, wanted: Sequence[int]) -> NDArray[np.bool_]:
    """Return ``np.isin(names, wanted)``, faster: ids are small numbers."""
    table = np.zeros(max(int(names.max(initial=0)), *wanted, 0) + 1, np.bool_)
    table[list(wanted)] = True
    return table[names]


def _spans(name: int, begins: Ints, ends: Ints) -> Spans:
    spans = np.zeros((len(begins), FIELDS), np.int64)
    spans[:, NAME], spans[:, BEGIN], spans[:, END] = name, begins, ends
    return spans


def pairs(begins: Ints, ends: Ints) -> tuple[Ints, Ints, int | None]:
    """Pair each begin with the first end after it, unless another begin comes first. Both arrays are sorted.

    Returns:
        The begins and ends of the pairs, and the last begin if it has no end.
    """
    if not len(begins):
        return begins, begins, None
    found = np.searchsorted(ends, begins)
    next_begins = np.append(begins[1:], np.iinfo(np.int64).max)
    partners = np.append(ends, np.iinfo(np.int64).max)[found]
    paired = (found < len(ends)) & (partners <= next_begins)
    return begins[paired], partners[paired], int(begins[-1]) if found[-1] == len(ends) else None


def exclusive(spans: Spans) -> Ints:
    """Return the time of each span of one thread without the spans within it, in ns.

    Spans are nested or disjoint, never partly overlapping, and none is empty. Of two equal spans, the later row is the outer.
    """
    order = np.lexsort((-spans[::-1, END], spans[::-1, BEGIN]))  # outer ones first
    begins, ends = spans[::-1, BEGIN][order], spans[::-1, END][order]
    own: Ints = ends - begins
    taken = own.copy()
    depth = _depths(begins, np.sort(ends, kind="stable"))
    places = np.arange(len(spans))
    for level in range(1, int(depth.max(initial=0)) + 1):
        # The parent is the last one of the level above that has begun, in this order.
        parents = np.maximum.accumulate(np.where(depth == level - 1, places, 0))
        inner = np.flatnonzero(depth == level)
        np.subtract.at(own, parents[inner], taken[inner])
    result: Ints = np.empty_like(own)
    result[order] = own
    return result[::-1]


def _depths(begins: Ints, ends: Ints) -> Ints:
    """Return for each begin how many spans are around it; both are sorted."""
    # Merging is faster than to search each begin among the ends.
    merged = np.argsort(np.concatenate([ends, begins]), kind="stable")  # of equal ones, the end comes first
    at = np.flatnonzero(merged >= len(ends))
    places = np.arange(len(begins))
    ended: Ints = at - places
    return places - ended
