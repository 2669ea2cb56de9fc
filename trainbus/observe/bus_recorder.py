"""``BusRecorder``: record the spans of a bus and account for the time of its training."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from trainbus.eventloop.bus.subscription import Subscription
from trainbus.eventloop.errors import LaneClosedError
from trainbus.eventloop.events import CostsMeasured, Event, RanksMeasured
from trainbus.eventloop.events.event import name_of, registry
from trainbus.eventloop.measure.spans import BEGIN, END, NAME, THREAD, Recorder, Spans, Steps
from trainbus.eventloop.offload import Lane, LaneMeter
from trainbus.eventloop.seams import Seam
from trainbus.observe.account import NEEDED, Account, among
from trainbus.observe.costs import Costs, Durations, LaneCosts, Part
from trainbus.observe.exchange import RankExchange
from trainbus.observe.memory import Memory
from trainbus.observe.ranks import RankCosts, Spent, spent_here
from trainbus.observe.totals import Totals, at

PUBLISH_EVERY: Final = Seam(2.0)  # seconds


class Call(NamedTuple):
    """The name of a span: a handler at a mount point, or the hand-off to its lane."""

    subscription: Subscription
    mount_point: str


class ForeignCall(NamedTuple):
    """The name of a span: a callback of another library, in whose trainer the bus is."""

    label: str
    method: str


class StreamCall(NamedTuple):
    """The name of a span: the hand-off to a stream. All streams share one name, because streams come and go."""

    mount_point: str


Kind = Literal["queued", "handled", "waiting", "worked"]


class LaneSpan(NamedTuple):
    """The name of a span of a lane.

    - ``"queued"``: an event waits from queueing to delivery; on the consumer's thread.
    - ``"handled"``: a call of the handler, on the same thread. Calls of async handlers may overlap.
    - ``"waiting"``: a publisher waits for the full lane.
    - ``"worked"``: a call in a worker process. The process id stands for the thread.
    """

    subscription: Subscription
    kind: Kind


class BusRecorder(Recorder):
    """Record the spans of a bus, and compute its costs from them."""

    def __init__(self, bus: Any) -> None:
        super().__init__()
        self._bus: Any = weakref.proxy(bus)
        self._published = 0.0  # when costs were published last
        self._totals = Totals()  # of lanes
        self._of_lanes: list[int] = []  # ids of their spans
        self._accounts: dict[int, Account] = {}
        self._meters: dict[Subscription, LaneMeter] = {}
        self._beside: list[int] = []  # ids of spans outside of the account
        self._memory = Memory()
        self._exchange: RankExchange | None = None
        self.add_reader(self._add)

    def needs(self, event_type: type[Event]) -> bool:
        """Return True if the costs need the spans of an event even if it has no subscriber."""
        return name_of(event_type) in NEEDED

    def id_of_publish(self, event_type: type[Event], heard: Sequence[Subscription]) -> int:
        """Return the id of the records of an event's publishes."""
        name = name_of(event_type)
        calls = [self.id_of(StreamCall(name) if one.mode == "stream" else Call(one, name)) for one in heard]
        return self.id_of(Steps((*calls, self.id_of(name))))

    def call(self, label: str, method: str) -> AbstractContextManager[None]:
        """Record a ``with`` block as a call of another library's callback."""
        return self.span(ForeignCall(label, method))

    def meter_of(self, subscription: Subscription) -> LaneMeter | None:
        """Return the meter for the lane of a subscription; None for a stream, which is too short-lived."""
        if subscription.mode == "stream":
            return None
        if subscription not in self._meters:
            ids = {kind: self.id_of(LaneSpan(subscription, kind)) for kind in get_args(Kind)}
            self._of_lanes += ids.values()
            self._beside += [ids["queued"], ids["handled"], ids["worked"]]
            self._meters[subscription] = LaneMeter(self.add, **ids)
        return self._meters[subscription]

    def costs(self) -> Costs:
        """Return the costs of the training so far, up to the last mount point of the run."""
        self.drain()
        with self._reading:
            accounts = list(self._accounts.values())
            wall = sum(one.wall for one in accounts)
            parts = self._parts(accounts, wall)
            steps: Counter[int] = sum((one.steps for one in accounts), Counter())
            stepped = sum(one.stepped for one in accounts)
            meters = list(self._meters.items())
            lanes = [self._lane_costs(one, one.lane, meter) for one, meter in meters if one.lane is not None]
        parts.sort(key=lambda part: -part.seconds)
        return Costs(
            wall=wall / 1e9,
            parts=[part for part in parts if part.seconds or part.calls],
            steps=Durations(dict(steps), stepped / 1e9),
            lanes=[one for one in lanes if one.delivered or one.failed or one.dropped or one.pending],
            memory=self._memory.resident,
            growth=self._memory.growth(),
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
            report=self._publish_ranks,
            trains=lambda: self._bus.internal.progress is not None,
        )

    def stop(self) -> None:
        """Stop the threads after a last drain. Idempotent."""
        self._leave_ranks()
        super().stop()

    def looked(self) -> None:
        """Sample the memory, and publish ``costs_measured`` when it is due."""
        with suppress(ReferenceError, LaneClosedError):  # the bus is gone, or closes
            accounts = list(self._accounts.values())
            bus, iterations = self._bus, sum(one.steps.total() for one in accounts)
            self._memory.sample(iterations, bus.hooks, bus.subscriptions, bus.internal.steps)
            now, progress = time.monotonic(), self._bus.internal.progress  # None while no run is open
            if progress is not None and now - self._published >= PUBLISH_EVERY.value and self._bus.wants(CostsMeasured):
                self._published = now
                self._bus.publish(CostsMeasured(progress=progress, costs=self.costs()))

    def _leave_ranks(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()

    def _spent(self) -> Spent:
        costs = self.costs()
        return spent_here(costs.steps.total, ((part.group, part.name, part.seconds) for part in costs.parts))

    def _publish_ranks(self, ranks: RankCosts) -> None:
        with suppress(ReferenceError, LaneClosedError):
            progress = self._bus.internal.progress  # None while no run is open
            if progress is not None and self._bus.wants(RanksMeasured):
                self._bus.publish(RanksMeasured(progress=progress, ranks=ranks))

    def _parts(self, accounts: list[Account], wall: int) -> list[Part]:
        own: Counter[Any] = Counter()
        publishing = 0
        for name, number in list(self._ids.items()):
            spent = sum(one.spent(number) for one in accounts)
            if isinstance(name, str) and name in registry:
                publishing += spent
            elif spent or isinstance(name, Call | StreamCall):
                own[name] += spent
        parts = [self._part(accounts, name, spent, wall) for name, spent in own.items()]
        rest = wall - sum(own.values()) - publishing
        for name, spent in (("publishing", publishing), ("rest", rest)):
            parts.append(Part(group="trainbus", name=name, calls=0, seconds=spent / 1e9, share=spent / max(wall, 1)))
        return parts

    def _part(self, accounts: list[Account], name: Any, spent: int, wall: int) -> Part:
        seconds, share = spent / 1e9, spent / max(wall, 1)
        number = self.id_of(name)
        calls = sum(at(one.calls.calls, number) for one in accounts)
        p99 = max((one.calls.quantile(number, 0.99) for one in accounts), default=0.0) / 1e9
        if isinstance(name, LaneSpan):
            return Part("waiting", name.subscription.label, calls, seconds, share, p99, name.subscription.mount_point)
        if isinstance(name, StreamCall):
            return Part("hand-off", "stream", calls, seconds, share, p99, name.mount_point)
        if isinstance(name, ForeignCall):
            return Part("hook", name.label, calls, seconds, share, p99, name.method)
        if not isinstance(name, Call):
            return Part("training", name, calls, seconds, share, p99)
        group = "hook" if name.subscription.mode == "inline" else "hand-off"
        return Part(group, name.subscription.label, calls, seconds, share, p99, name.mount_point)

    def _lane_costs(self, one: Subscription, lane: Lane, meter: LaneMeter) -> LaneCosts:
        stats, totals = lane.stats, self._totals
        return LaneCosts(
            one.label,
            list(one.mount_points),
            stats.delivered,
            stats.failed,
            stats.dropped,
            stats.pending,
            seconds=at(totals.sums, meter.handled) / 1e9,
            waited=at(totals.sums, meter.waiting) / 1e9,
            depth_mean=meter.depths / max(meter.arrived, 1),
            depth_max=meter.deepest,
            age_mean=totals.mean(meter.queued) / 1e9,
            age_max=at(totals.most, meter.queued) / 1e9,
            capacity=lane.capacity,
            full=lane.full,
        )

    def _add(self, spans: Spans) -> None:
        numbers, durations = spans[:, NAME], spans[:, END] - spans[:, BEGIN]
        of_lanes = among(numbers, self._of_lanes)
        self._totals.add(numbers[of_lanes], durations[of_lanes])
        names = self.names
        calls, sums = np.bincount(numbers), np.bincount(numbers, durations)
        for number in np.flatnonzero(calls).tolist():
            if isinstance(name := names[number], Call):
                name.subscription.spent(int(calls[number]), int(sums[number]))
        for thread in np.unique(spans[:, THREAD]).tolist():
            own = spans.compress(spans[:, THREAD] == thread, axis=0)
            if thread not in self._accounts and not np.isin(own[:, NAME], self._beside).all():
                self._accounts[thread] = Account(self.id_of, lambda: self._beside)
            if thread in self._accounts:
                self._accounts[thread].add(own)
