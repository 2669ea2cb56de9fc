"""Metrics of runs for Prometheus, in the OpenMetrics format; needs the extra ``metrics`` (prometheus-client).

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(RunCollector(bus))             # of several buses: one collector, RunCollector(bus_1, bus_2)
    start_http_server(9090, addr="127.0.0.1")

    app.mount("/metrics", metrics_app(RunCollector(bus)))      # or in your Starlette or FastAPI application

A scrape reads counters that the bus keeps while ``bus.timing`` is on. Adding a bus turns it on.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import count
from threading import Lock
from typing import Any, Final, NamedTuple

import anyio.to_thread

from trainbus.eventloop.bus import Bus, Subscription
from trainbus.eventloop.checks import check_value
from trainbus.eventloop.device import memory_allocated
from trainbus.eventloop.errors import ConfigurationError, cannot_import
from trainbus.eventloop.plain import encodable
from trainbus.observe.costs import Costs, Durations
from trainbus.observe.environment import versions
from trainbus.observe.latest import LatestHook
from trainbus.observe.states import ENDED, RunStatus
from trainbus.observe.story import RunStory

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client import metrics_core as core
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as error:
    raise cannot_import("/metrics", "prometheus-client", "metrics", error, "prometheus_client") from error

_BOUNDS: Final = range(13 * 8, 38 * 8 + 1, 4)  # eighths of doublings of 1 ns: 8 µs to 275 s, two a doubling
_STATES: Final = (RunStatus.RUNNING, RunStatus.PAUSED, *ENDED)

_FAMILIES: Final[Mapping[str, tuple[type[core.Metric], str, tuple[str, ...]]]] = {
    "run": (core.InfoMetricFamily, "Facts of the run", ()),
    "run_state": (core.StateSetMetricFamily, "State of the run", ()),
    "iterations": (core.CounterMetricFamily, "Training iterations (micro-batches), those before a resume included", ()),
    "updates": (core.CounterMetricFamily, "Optimizer steps, those before a resume included", ()),
    "epochs": (core.CounterMetricFamily, "Training epochs, those before a resume included", ()),
    "throughput_iterations_per_second": (core.GaugeMetricFamily, "Iterations per second over the last ten seconds", ()),
    "step_seconds": (core.HistogramMetricFamily, "Time from the end of an iteration to the end of the next one", ()),
    "cost_seconds": (
        core.CounterMetricFamily,
        "Time of the training thread by hook and part of the training; the parts add up to the wall time",
        ("group", "part", "mount_point"),
    ),
    "scalar": (core.GaugeMetricFamily, "Last value of a scalar of the run", ("name",)),
    "learning_rate": (core.GaugeMetricFamily, "Learning rate of a parameter group", ("optimizer", "group")),
    "lane_depth": (core.GaugeMetricFamily, "Events waiting in the lane of an offloaded handler", ("handler", "mount_point")),
    "lane_delivered": (core.CounterMetricFamily, "Events handled by an offloaded handler", ("handler", "mount_point")),
    "lane_dropped": (core.CounterMetricFamily, "Events dropped by a full lane", ("handler", "mount_point")),
    "lane_failed": (core.CounterMetricFamily, "Events whose offloaded handler has failed", ("handler", "mount_point")),
    "handler_failures": (core.CounterMetricFamily, "Isolated errors of an inline handler", ("handler", "mount_point")),
    "checkpoints": (core.CounterMetricFamily, "Checkpoints by outcome: committed, failed or skipped", ("outcome",)),
    "checkpoint_stall_seconds": (core.SummaryMetricFamily, "Time that training waited for a copy of its state", ()),
    "checkpoint_commit_seconds": (core.SummaryMetricFamily, "Time to write a checkpoint beside the training", ()),
    "checkpoint_bytes": (core.GaugeMetricFamily, "Size of the last checkpoint", ()),
    "checkpoint_age_seconds": (core.GaugeMetricFamily, "Time since the last checkpoint was committed", ()),
    "memory_bytes": (core.GaugeMetricFamily, "Memory of the process: resident, or allocated on a device", ("device",)),
    "spans_dropped": (core.CounterMetricFamily, "Spans lost by the recorder; their time is missing from the costs", ()),
}
"""By name without the prefix: kind, help, and the labels after ``run``."""


class RunCollector(Collector):  # type: ignore[misc]  # mypy skips prometheus-client, which may not be installed
    """The metrics of the runs on some buses. Register it in a Prometheus registry, or serve it by :func:`metrics_app`.

    All samples have the label ``run``, the name of the run. Further runs with the same name get ``-2``, ``-3`` and so on
    appended. A bus has no samples before its first run begins, and keeps the last ones after a run. Buses are held weakly.

    Args:
        *buses: buses to :meth:`add`.
    """

    def __init__(self, *buses: Bus) -> None:
        self._lock = Lock()
        self._watched: list[_Watched] = []
        for bus in buses:
            self.add(bus)

    def add(self, bus: Bus, name: str | None = None) -> None:
        """Collect the metrics of the runs on a bus from now on, and turn on its ``timing``.

        Args:
            bus: adding one again has no effect.
            name: the label ``run``, instead of the name of the run.
        """
        check_value("bus", bus, Bus)
        check_value("name", name, str | None)
        with self._lock:
            if any(one.bus() is bus for one in self._watched):
                return
            latest = LatestHook()
            bus.add(latest)
            self._watched.append(_Watched(weakref.ref(bus), name or "", latest, _Lanes()))

    def remove(self, bus: Bus) -> None:
        """Stop collecting the metrics of a bus; its ``timing`` stays on."""
        with self._lock:
            gone = [one for one in self._watched if one.bus() is bus]
            self._watched = [one for one in self._watched if one not in gone]
        for one in gone:
            bus.off(one.latest)

    def describe(self) -> Iterator[core.Metric]:
        """Yield the metrics without samples, by which a registry refuses a second collector of the same names."""
        yield from _Families()

    def collect(self) -> Iterator[core.Metric]:
        """Yield the metrics with their current values."""
        families = _Families()
        taken: set[str] = set()
        with self._lock:
            self._watched = [one for one in self._watched if one.bus() is not None]
            for one in self._watched:
                bus = one.bus()
                if bus is not None and one.latest.story.manifest.name:
                    name = one.name or one.latest.story.manifest.name
                    labels = (f"{name}-{number}" if number > 1 else name for number in count(1))
                    families.run = next(label for label in labels if label not in taken)
                    taken.add(families.run)
                    _collect(families, bus, one)
        yield from (family for family in families if family.samples)


def expose(collector: Collector, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics as text and its content type: OpenMetrics, or the older format of Prometheus.

    Args:
        collector: the source of the metrics.
        accept: the ``Accept`` header of the request, which selects the format.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def metrics_app(collector: Collector) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that answers every GET with the metrics; mount it at ``/metrics``."""

    async def app(scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            raise ConfigurationError(f"metrics are served over http, not {scope['type']}; mount them at a separate path")
        body, headers, status = b"GET only\n", [(b"allow", b"GET, HEAD"), (b"content-type", b"text/plain")], 405
        if scope["method"] in ("GET", "HEAD"):
            accept = next((value for name, value in scope["headers"] if name == b"accept"), b"").decode("latin-1")
            # In a thread, because it waits for the recorder's locks.
            body, content_type = await anyio.to_thread.run_sync(expose, collector, accept)
            headers, status = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")], 200
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


# ------------------------------------------------------------------------------------------------------ internals


class _Watched(NamedTuple):
    bus: weakref.ref[Bus]
    name: str
    latest: LatestHook
    lanes: _Lanes


class _Families:
    """Metric families by name. Added samples get the label of the current :attr:`run`."""

    def __init__(self) -> None:
        self.run = ""
        self._made: dict[str, Any] = {
            name: kind(f"trainbus_{name}", text, labels=["run", *labels]) for name, (kind, text, labels) in _FAMILIES.items()
        }

    def add(self, name: str, *value: Any, labels: Iterable[str] = ()) -> None:
        """Add a sample."""
        self._made[name].add_metric(encodable([self.run, *labels]), *map(encodable, value))

    def __iter__(self) -> Iterator[core.Metric]:
        return iter(self._made.values())


class _Lanes:
    """Counts of handlers by label and mount point. They never fall: removed handlers stay in the sums."""

    def __init__(self) -> None:
        self._seen: dict[Subscription, tuple[int, int, int]] = {}
        self._gone: dict[tuple[str, str, bool], Counter[str]] = {}

    def count(self, subscriptions: Iterable[Subscription]) -> dict[tuple[str, str, bool], Counter[str]]:
        """Return the counts by label, mount point and whether it has a lane."""
        stats = {one: one.stats for one in subscriptions}
        for one in [one for one in self._seen if one not in stats]:
            delivered, failed, dropped = self._seen.pop(one)
            self._gone.setdefault(_key(one), Counter()).update(delivered=delivered, failed=failed, dropped=dropped)
        counts = {key: Counter(gone) for key, gone in self._gone.items()}
        for one, now in stats.items():
            self._seen[one] = now.delivered, now.failed, now.dropped
            added = {"delivered": now.delivered, "failed": now.failed, "dropped": now.dropped, "pending": now.pending}
            counts.setdefault(_key(one), Counter()).update(added)
        return counts


def _key(one: Subscription) -> tuple[str, str, bool]:
    return one.label, one.mount_point, one.lane is not None


def _collect(families: _Families, bus: Bus, watched: _Watched) -> None:
    latest, story, progress = watched.latest, watched.latest.story, watched.latest.progress
    families.add("run", _facts(latest))
    families.add("run_state", {state: state == story.state for state in _STATES})
    families.add("iterations", progress.iter)
    families.add("updates", progress.update)
    families.add("epochs", progress.epoch)
    families.add("throughput_iterations_per_second", latest.throughput())
    scalars = {f"train/{name}": value for name, value in latest.outputs.items()} | story.metrics
    for name, value in scalars.items():
        families.add("scalar", float(value), labels=[name])
    for names, rate in latest.rates.items():
        families.add("learning_rate", rate, labels=names)
    _collect_checkpoints(families, story)
    for (handler, mount_point, has_lane), counts in watched.lanes.count(bus.subscriptions).items():
        _collect_handler(families, [handler, mount_point], counts, has_lane=has_lane)
    if bus.timing:
        _collect_costs(families, bus.costs())
    if (memory := memory_allocated(latest.device)) is not None:
        families.add("memory_bytes", memory, labels=[str(latest.device)])


def _collect_handler(families: _Families, labels: list[str], counts: Counter[str], *, has_lane: bool) -> None:
    if has_lane:
        families.add("lane_depth", counts["pending"], labels=labels)
        for name in ("delivered", "dropped", "failed"):
            families.add(f"lane_{name}", counts[name], labels=labels)
    elif counts["failed"]:
        families.add("handler_failures", counts["failed"], labels=labels)


def _collect_checkpoints(families: _Families, story: RunStory) -> None:
    for outcome, number in story.outcomes.items():
        families.add("checkpoints", number, labels=[outcome])
    families.add("checkpoint_stall_seconds", story.outcomes["committed"], story.stalled)
    families.add("checkpoint_commit_seconds", story.outcomes["committed"], story.wrote)
    if (last := story.last_checkpoint) is not None:
        families.add("checkpoint_bytes", last.bytes)
        families.add("checkpoint_age_seconds", max(0.0, time.time() - last.time))


def _collect_costs(families: _Families, costs: Costs) -> None:
    families.add("step_seconds", _buckets(costs.steps), costs.steps.seconds)
    spent: Counter[tuple[str, str, str]] = Counter()  # two hooks may have one name
    for part in costs.parts:
        spent[part.group, part.name, part.mount_point] += part.seconds  # type: ignore[assignment]  # a Counter of floats
    for labels, seconds in spent.items():
        families.add("cost_seconds", max(0.0, seconds), labels=labels)
    families.add("spans_dropped", costs.dropped)
    if costs.memory:
        families.add("memory_bytes", costs.memory, labels=["host"])


def _buckets(steps: Durations) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound in seconds, always with the same bounds."""
    counts = [
        (f"{2.0 ** (bound / 8) / 1e9:.4g}", sum(n for index, n in steps.counts.items() if index < bound)) for bound in _BOUNDS
    ]
    return [*counts, ("+Inf", steps.total)]


def _facts(latest: LatestHook) -> dict[str, str]:
    known = versions()
    return {
        "version": known.get("trainbus", ""),
        "torch": known["torch"],
        "device": str(latest.device),
        "rank": str(latest.rank),
        "world_size": str(latest.world_size),
    }
