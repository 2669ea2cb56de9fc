"""``Account``: where the time of a run went, from spans. Its parts add up to the wall time."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.table import Table

from eventloop.bus.subscription import Subscription
from eventloop.events import CostsMeasured, Event, RanksMeasured
from eventloop.events.event import name_of, registry
from eventloop.observe.exchange import RankExchange
from eventloop.observe.ranks import RankCosts, Spent, spent_here
from eventloop.observe.spans import BEGIN, END, FIELDS, NAME, THREAD, Recorder, Spans

_BINS: Final = 8  # per doubling: quantiles are exact to 4 %
_DOUBLINGS: Final = 48


class Totals:
    """Count, sum, maximum and quantiles of the durations of many names, in bounded memory. Times are nanoseconds."""

    def __init__(self) -> None:
        self.calls = np.zeros(0, np.int64)
        self.sums = np.zeros(0, np.int64)
        self.most = np.zeros(0, np.int64)
        self._bins = np.zeros((0, _BINS * _DOUBLINGS), np.int64)

    def add(self, names: NDArray[np.int64], durations: NDArray[np.int64]) -> None:
        """Add durations, each with the id of its name."""
        if not len(names):
            return
        self._grow(int(names.max()) + 1)
        size = len(self.calls)
        self.calls += np.bincount(names, minlength=size)
        # float64 is exact up to 2**53 ns, a hundred days in one batch.
        self.sums += np.bincount(names, durations, minlength=size).astype(np.int64)
        np.maximum.at(self.most, names, durations)
        bins = np.minimum(np.log2(np.maximum(durations, 1)) * _BINS, _BINS * _DOUBLINGS - 1).astype(np.int64)
        np.add.at(self._bins, (names, bins), 1)

    def quantile(self, name: int, share: float) -> float:
        """Return the duration that ``share`` of the calls do not exceed, exact to 4 %; 0 without calls."""
        if name >= len(self.calls) or not self.calls[name]:
            return 0.0
        reached = np.cumsum(self._bins[name])
        index = int(np.searchsorted(reached, share * reached[-1]))
        return float(min(2.0 ** ((index + 0.5) / _BINS), float(self.most[name])))

    def _grow(self, size: int) -> None:
        more = size - len(self.calls)
        if more > 0:
            self.calls, self.sums, self.most = (np.pad(one, (0, more)) for one in (self.calls, self.sums, self.most))
            self._bins = np.pad(self._bins, ((0, more), (0, 0)))


class Histogram(msgspec.Struct, frozen=True):
    """Counts of durations: ``counts[i]`` of those from ``2**(i / 8)`` ns on, below ``2**((i + 1) / 8)`` ns."""

    counts: dict[int, int] = {}
    seconds: float = 0.0
    """The sum of the durations."""

    @property
    def total(self) -> int:
        """The number of durations."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float:
        """Return the duration in seconds that ``share`` of them do not exceed, exact to 5 %; 0 if there are none."""
        wanted, seen = share * self.total, 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= wanted:
                return float(2.0 ** ((index + 0.5) / _BINS)) / 1e9
        return 0.0

    def since(self, before: Histogram) -> Histogram:
        """Return the counts that were added since ``before``, an earlier state of this histogram."""
        more = {index: number - before.counts.get(index, 0) for index, number in self.counts.items()}
        return Histogram({index: number for index, number in more.items() if number}, self.seconds - before.seconds)


class Part(msgspec.Struct, frozen=True):
    """One line of the costs. ``seconds`` does not include the parts within it; ``mean`` and ``p99`` are of whole calls."""

    group: str
    name: str
    calls: int
    seconds: float
    share: float
    mean: float = 0.0
    p99: float = 0.0
    mount_point: str = ""


class LaneCosts(msgspec.Struct, frozen=True):
    """What an offloaded handler did. Times are seconds, on threads of its own; ``waited`` is the training thread's."""

    name: str
    mount_points: list[str]
    delivered: int
    failed: int
    dropped: int
    pending: int
    seconds: float = 0.0
    """Time in the handler."""
    waited: float = 0.0
    """Time that publishers waited for a place in the full lane."""
    depth_mean: float = 0.0
    depth_max: int = 0
    age_mean: float = 0.0
    """Time from publish to delivery."""
    age_max: float = 0.0


class Growth(msgspec.Struct, frozen=True):
    """Growth of memory in a window of time. ``name`` is that of a hook, or "process"."""

    name: str
    bytes: int
    """Growth within the window."""
    seconds: float
    iterations: int
    """Length of the window."""


class Costs(msgspec.Struct, frozen=True):
    """Where the wall time of the training thread went, largest part first. The parts add up to ``wall``. Times are seconds.

    Print it, or read ``parts``.
    """

    wall: float
    parts: list[Part]
    steps: Histogram = Histogram()
    """Durations of iterations, from the end of one to the end of the next, with the time of waiting for data."""
    lanes: list[LaneCosts] = []
    memory: int = 0
    """Resident memory of the process in bytes."""
    growth: list[Growth] = []
    dropped: int = 0
    """Spans that were lost; the parts are then too small by theirs."""
    ranks: RankCosts | None = None
    """The comparison with the other ranks; None with a single process, and in the first two seconds."""

    def __rich__(self) -> RenderableType:
        table = Table(title=f"Where {self.wall:.3g} s went", title_justify="left", box=None, padding=(0, 1, 0, 0))
        table.add_column("part")
        for name in ("share", "seconds", "calls", "mean ms", "p99 ms"):
            table.add_column(name, justify="right", no_wrap=True)
        for part in self.parts:
            name = f"{part.name} ({part.mount_point})" if part.mount_point else part.name
            each = (f"{part.mean * 1e3:.3f}", f"{part.p99 * 1e3:.3f}") if part.calls else ("", "")
            table.add_row(name, f"{part.share:.1%}", f"{part.seconds:.3f}", str(part.calls or ""), *each)
        return table if self.ranks is None else Group(table, "", self.ranks)

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


class Call(NamedTuple):
    """The name of a span: a handler at a mount point, or the hand-off to its lane."""

    subscription: Subscription
    mount_point: str


_EPOCH_ENDS = ("after_train_epoch", "after_train", "after_run")

BETWEEN: Final[Sequence[tuple[str, tuple[str, ...], str]]] = (
    ("before_train_iter", ("after_train_iter", *_EPOCH_ENDS), "step"),
    ("after_train_iter", ("before_train_iter", *_EPOCH_ENDS), "waiting for data"),
    ("before_train_epoch", ("before_train_iter", *_EPOCH_ENDS), "waiting for data"),
    ("after_train_epoch", ("before_train_epoch", "after_train", "after_run"), "between epochs"),
    ("before_val", ("after_val", "after_run"), "validation"),
    ("before_test", ("after_test", "after_run"), "test"),
)
"""What lies between mount points: from the end of the first to the begin of the next one in the tuple."""

WITHIN: Final[Sequence[tuple[str, tuple[str, ...], str]]] = (
    ("before_forward", ("after_forward",), "forward"),
    ("before_backward", ("after_backward",), "backward"),
    ("before_optimizer_step", ("after_optimizer_step",), "optimizer step"),
    ("before_save_checkpoint", ("checkpoint_staged",), "copying for checkpoints"),
)
"""The same, for what ends before the next mount point of the list above."""

STEADY: Final = frozenset(name for first, following, _ in BETWEEN for name in (first, *following)) | {"before_run"}
"""The mount points that the run itself publishes, in no handler. At their ends, the account is complete up to then."""

NEEDED: Final = STEADY | {name for first, following, _ in WITHIN for name in (first, *following)}
"""The mount points whose spans are needed, heard or not."""

_MARKS: Final = ("before_train_epoch", "after_train_iter", "after_val")
"""An iteration begins at the end of the last one of these."""

TOLD_EVERY: Final = 2.0  # seconds

_ALSO_STEADY: Final = ("before_val_iter", "after_val_iter", "before_test_iter", "after_test_iter")


class BusRecorder(Recorder):
    """The recorder of a bus, with the account of its costs."""

    def __init__(self, bus: Any) -> None:
        super().__init__()
        self._bus: Any = weakref.proxy(bus)
        self._told = 0.0  # when costs were published last
        self._totals = Totals()
        self._accounts: dict[int, _Account] = {}
        self._exchange: RankExchange | None = None
        for name in (*NEEDED, *_ALSO_STEADY, *(part for _, _, part in (*BETWEEN, *WITHIN))):
            self.id_of(name)
        self._steady = np.array([self.id_of(name) for name in (*STEADY, *_ALSO_STEADY)])
        self._first = self.id_of("before_run")
        self.add_reader(self._add)

    def needs(self, event_type: type[Event]) -> bool:
        """Return True if the costs need the spans of an event even if it has no subscriber."""
        return name_of(event_type) in NEEDED

    def id_of_event(self, event_type: type[Event]) -> int:
        """Return the id of an event's span."""
        return self.id_of(name_of(event_type))

    def id_of_call(self, subscription: Subscription, event_type: type[Event]) -> int:
        """Return the id of the span of a handler, or of the hand-off to its lane."""
        return self.id_of(Call(subscription, name_of(event_type)))

    def costs(self) -> Costs:
        """Return the costs of the training so far, up to the last mount point of the run."""
        self.drain()
        accounts = list(self._accounts.values())
        wall = sum(one.until - one.begun for one in accounts)
        own: Counter[Any] = Counter()
        publishing = 0
        for name, number in list(self._ids.items()):  # routes that are compiled meanwhile add names
            spent = sum(one.spent(number) for one in accounts)
            if isinstance(name, str) and name in registry:
                publishing += spent
            elif spent or isinstance(name, Call):
                own[name] += spent
        parts = [self._part(name, spent, wall) for name, spent in own.items()]
        rest = wall - sum(own.values()) - publishing
        for name, spent in (("publishing", publishing), ("rest", rest)):
            parts.append(Part(group="trainbus", name=name, calls=0, seconds=spent / 1e9, share=spent / max(wall, 1)))
        parts.sort(key=lambda part: -part.seconds)
        steps: Counter[int] = sum((one.steps for one in accounts), Counter())
        lanes = [_lane_costs(one) for one in self._bus.subscriptions if one.lane is not None]
        return Costs(
            wall=wall / 1e9,
            parts=[part for part in parts if part.seconds or part.calls],
            steps=Histogram(dict(steps), sum(one.stepped for one in accounts) / 1e9),
            lanes=lanes,
            dropped=self.dropped,
            ranks=None if self._exchange is None else self._exchange.whole,
        )

    def join_ranks(self, run: str, rank: int, world_size: int) -> None:
        """Exchange costs with the other ranks from now on, until :meth:`stop`; ``run`` is equal on all ranks."""
        self._leave_ranks()
        self._exchange = RankExchange(
            run,
            rank,
            world_size,
            measure=self._spent,
            tell=self._tell_ranks,
            trains=lambda: bool(self._bus.training),
        )
        self._exchange.start()

    def stop(self) -> None:
        """End the threads, and drain a last time. Idempotent."""
        self._leave_ranks()
        super().stop()

    def drained(self) -> None:
        """Publish ``costs_measured`` when it is time."""
        now = time.monotonic()
        with suppress(ReferenceError):  # the bus is gone
            progress = self._bus.progress  # None while no run is open
            if progress is not None and now - self._told >= TOLD_EVERY and self._accounts and self._bus.wants(CostsMeasured):
                self._told = now
                self._bus.publish(CostsMeasured(progress=progress, costs=self.costs()))

    def _leave_ranks(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()

    def _spent(self) -> Spent:
        costs = self.costs()
        return spent_here(costs.steps.total, ((part.group, part.name, part.seconds) for part in costs.parts))

    def _tell_ranks(self, ranks: RankCosts) -> None:
        with suppress(ReferenceError):
            if self._bus.wants(RanksMeasured):
                self._bus.publish(RanksMeasured(ranks=ranks))

    def _part(self, name: Any, spent: int, wall: int) -> Part:
        seconds, share = spent / 1e9, spent / max(wall, 1)
        if not isinstance(name, Call):
            return Part(group="training", name=name, calls=0, seconds=seconds, share=share)
        number, one = self.id_of(name), name.subscription
        calls = int(self._totals.calls[number]) if number < len(self._totals.calls) else 0
        mean = int(self._totals.sums[number]) / calls / 1e9 if calls else 0.0
        group = "hook" if one.lane is None else "hand-off"
        p99 = self._totals.quantile(number, 0.99) / 1e9
        return Part(group, one.label, calls, seconds, share, mean, p99, name.mount_point)

    def _add(self, spans: Spans) -> None:
        numbers, durations = spans[:, NAME], spans[:, END] - spans[:, BEGIN]
        self._totals.add(numbers, durations)
        names = self.names
        for number in np.unique(numbers):
            if isinstance(name := names[number], Call):
                own = durations[numbers == number]
                name.subscription.spent(len(own), int(own.sum()))
        for thread in np.unique(spans[:, THREAD]):
            own_spans = spans[spans[:, THREAD] == thread]
            if thread not in self._accounts and (own_spans[:, NAME] == self._first).any():
                begun = int(own_spans[own_spans[:, NAME] == self._first][0, BEGIN])
                self._accounts[int(thread)] = _Account(begun, self)
            if thread in self._accounts:
                self._accounts[int(thread)].add(own_spans, self._steady)


class _Account:
    """The time of one thread that runs a training, by the ids of names.

    Each instant up to ``until`` is counted once. A handler that has begun before and ends later counts for the rest only.
    """

    def __init__(self, begun: int, recorder: Recorder) -> None:
        self.begun = self.until = begun
        self._own = np.zeros(0, np.int64)
        self._pending = np.zeros((0, FIELDS), np.int64)
        self._open: set[tuple[int, tuple[int, ...]]] = set()
        self.steps: Counter[int] = Counter()
        """The histogram of iterations."""
        self.stepped = 0
        """The time of all iterations in ns."""
        self._last_mark = begun
        self._iteration, self._marks = recorder.id_of("after_train_iter"), [recorder.id_of(name) for name in _MARKS]
        self._between = [_numbered(one, recorder) for one in BETWEEN]
        self._within = [_numbered(one, recorder) for one in WITHIN]

    def spent(self, number: int) -> int:
        """Return the nanoseconds of a name, without the spans in it."""
        return int(self._own[number]) if number < len(self._own) else 0

    def add(self, spans: Spans, steady: NDArray[np.int64]) -> None:
        """Add spans of this thread, and count those up to the last mount point of the run."""
        pending = np.concatenate([self._pending, spans])
        marks = np.sort(pending[np.isin(pending[:, NAME], steady), END])
        if not len(marks) or marks[-1] <= self.until:
            self._pending = pending
            return
        until = int(marks[-1])
        window = pending[pending[:, END] <= until]
        self._pending = pending[pending[:, END] > until]
        self._count_steps(window)
        made = self._made(window, marks, until)
        window = np.concatenate([window, made])
        window[:, BEGIN] = np.maximum(window[:, BEGIN], self.until)
        window = window[window[:, END] > window[:, BEGIN]]
        if len(window):
            own = np.bincount(window[:, NAME], exclusive(window)).astype(np.int64)
            size = max(len(own), len(self._own))
            self._own = np.pad(self._own, (0, size - len(self._own))) + np.pad(own, (0, size - len(own)))
        self.until = until

    def _count_steps(self, window: Spans) -> None:
        marks = np.sort(np.append(window[np.isin(window[:, NAME], self._marks), END], self._last_mark))
        ends = window[window[:, NAME] == self._iteration, END]
        if len(ends):
            taken = ends - marks[np.searchsorted(marks, ends) - 1]
            self.stepped += int(taken.sum())
            self.steps.update((np.log2(np.maximum(taken, 1)) * _BINS).astype(np.int64).tolist())
        self._last_mark = int(marks[-1])

    def _made(self, window: Spans, marks: NDArray[np.int64], until: int) -> Spans:
        """Return spans for what lies between mount points; remember those that are still open."""
        rows: list[tuple[int, int, int, int, int]] = []
        still_open: set[tuple[int, tuple[int, ...]]] = set()
        for first, following, part in self._between:
            begins = np.sort(window[window[:, NAME] == first, END])
            if (part, following) in self._open:
                begins = np.concatenate([[self.until], begins])
            ends = np.sort(window[np.isin(window[:, NAME], following), BEGIN])
            for begin, end in _pairs(begins, ends):
                if end is None:
                    still_open.add((part, following))
                rows.append((0, part, 0, begin, until if end is None else end))
        for first, following, part in self._within:
            begins = np.sort(window[window[:, NAME] == first, END])
            ends = np.sort(window[np.isin(window[:, NAME], following), BEGIN])
            for begin, end in _pairs(begins, ends):
                if end is not None and end <= marks[np.searchsorted(marks, begin, side="right")]:
                    rows.append((0, part, 0, begin, end))
        self._open = still_open
        return np.array(rows, np.int64).reshape(-1, FIELDS)


def _lane_costs(one: Subscription) -> LaneCosts:
    stats = one.stats
    return LaneCosts(one.label, list(one.mount_points), stats.delivered, stats.failed, stats.dropped, stats.pending)


def _numbered(one: tuple[str, tuple[str, ...], str], recorder: Recorder) -> tuple[int, tuple[int, ...], int]:
    first, following, part = one
    return recorder.id_of(first), tuple(map(recorder.id_of, following)), recorder.id_of(part)


def _pairs(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[tuple[int, int | None]]:
    """Pair each begin with the first end behind it, unless another begin comes first; the last one may have none."""
    found = np.searchsorted(ends, begins)
    for index, begin in enumerate(begins):
        if found[index] == len(ends):
            if index == len(begins) - 1:
                yield int(begin), None
        elif index == len(begins) - 1 or ends[found[index]] <= begins[index + 1]:
            yield int(begin), int(ends[found[index]])


def exclusive(spans: Spans) -> NDArray[np.int64]:
    """Return the time of each span of one thread without the spans within it, in ns.

    Spans of one thread are nested or apart, never partly over each other.
    """
    order = np.lexsort((-spans[:, END], spans[:, BEGIN]))
    begins, ends = spans[order, BEGIN], spans[order, END]
    own: NDArray[np.int64] = ends - begins
    # Walk through all begins and ends in time to know how deep each span lies.
    depth = np.arange(len(spans)) - np.searchsorted(np.sort(ends), begins, side="right")
    for level in range(1, int(depth.max(initial=0)) + 1):
        inner, outer = np.flatnonzero(depth == level), np.flatnonzero(depth == level - 1)
        parents = outer[np.searchsorted(begins[outer], begins[inner], side="right") - 1]
        np.subtract.at(own, parents, ends[inner] - begins[inner])
    result: NDArray[np.int64] = np.empty_like(own)
    result[order] = own
    return result
