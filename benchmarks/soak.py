"""``python -m benchmarks soak [--events N]``: publish millions of events to every kind of handler; memory must stay flat.

This is not a comparison: nothing is timed. It fails if the resident memory of this process, or that of its worker process,
grows after the first tenth, in which pools and caches fill.
"""

import argparse
import gc
import json
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import torch

from benchmarks.harness import environment
from trainbus.eventloop import Bus, Event, Progress
from trainbus.eventloop.events import AfterTrainIter

SAMPLES = 100
WARM = 0.1  # of the run, before memory counts
IMPORTS = 8000  # events before memory counts, in which the worker may still import its modules
GROWTH = 8.0  # MB of allowed growth, for arenas and fragments (a leak of 10 bytes per event is 100 MB in ten million events)


class Counter:
    """Count its arguments without keeping them."""

    def __init__(self) -> None:
        self.seen = 0

    def one(self, event: Event) -> None:
        self.seen += 1

    def batch(self, events: list[Event]) -> None:
        self.seen += len(events)

    async def task(self, events: list[Event]) -> None:
        self.seen += len(events)

    def fail(self, event: Event) -> None:
        raise ValueError("on purpose")


def in_worker(events: list[Event]) -> None:
    """Handle events in a worker process."""


def resident(pid: int | str = "self") -> float:
    """Return the resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return 0.0


def run(number: int) -> dict:
    """Publish ``number`` events and return what happened, memory among it."""
    counters = [Counter() for _ in range(5)]
    bus = Bus(drain_timeout=600)
    bus.on("after_train_iter", counters[0].one, every=2)
    bus.on("after_train_iter", counters[1].batch, offload="thread", batch=256)
    bus.on("after_train_iter", counters[2].task, batch=256)
    bus.on("after_train_iter", counters[3].one, offload="thread", every=10, queue=64, full="drop_old", timeout=60)
    bus.on("after_train_iter", in_worker, offload="process", every=5, batch=256)
    weight = torch.zeros(1000)
    bus.on("after_train_iter", counters[4].one, offload="thread", every=100, capture=lambda event: weight, max_bytes=400_000)
    bus.on("after_train_iter", counters[4].fail, offload="thread", every=max(1, number // 100), on_error="log", queue=8)

    samples = []
    step = max(1, number // SAMPLES)
    loss = torch.tensor(0.5)
    began = time.perf_counter()
    with bus:
        for i in range(number):
            bus.publish(AfterTrainIter(progress=Progress(iter=i), batch_idx=i, outputs={"loss": loss, "lr": 0.1}))
            if (i + 1) % step == 0:
                samples.append(sample(i + 1, began, show=(i + 1) // step % 10 == 0))
                # Cancel and subscribe again, because handles, routes and lanes must be freed, too.
                with bus.on("after_train_iter", counters[3].one, offload="thread"):
                    bus.publish(AfterTrainIter(progress=Progress(iter=i)))
        bus.drain()
        stats = [one.stats for one in bus.subscriptions]
        lanes = [one.stats for one in bus.subscriptions if one.mode != "inline"]
    for one in lanes:
        assert one.published == one.delivered + one.failed + one.dropped, one
        assert one.pending == one.bytes == 0, one
    warm = [entry for entry in samples if entry["events"] > max(WARM * number, IMPORTS)] or samples
    return {
        "events": number,
        "seconds": time.perf_counter() - began,
        "lanes": [{"handler": s.label, "mode": s.mode, **counts(t)} for s, t in zip(bus.subscriptions, stats, strict=True)],
        "growth_mb": {name: growth([entry[name] for entry in warm]) for name in ("rss_mb", "worker_rss_mb")},
        "samples": samples,
    }


def counts(stats) -> dict:
    return {name: getattr(stats, name) for name in ("published", "delivered", "failed", "dropped")}


def sample(events: int, began: float, *, show: bool) -> dict:
    gc.collect()
    workers = active_children()
    entry = {
        "events": events,
        "seconds": round(time.perf_counter() - began, 1),
        "rss_mb": round(resident(), 1),
        "worker_rss_mb": round(resident(workers[0].pid), 1) if workers else 0.0,
    }
    if show:
        row = "{events:>12,} events  {seconds:>7.1f} s  {rss_mb:>7.1f} MB  worker {worker_rss_mb:>7.1f} MB"
        print(row.format(**entry), flush=True)
    return entry


def growth(series: list[float]) -> float:
    """Return the growth of the median from the first to the last quarter; single peaks (a full lane) do not count."""
    quarter = max(1, len(series) // 4)
    first, last = sorted(series[:quarter]), sorted(series[-quarter:])
    return round(last[len(last) // 2] - first[len(first) // 2], 2)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    where = environment()
    result = run(options.events)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": where, **result}, indent=1, default=str))
    for one in result["lanes"]:
        print(one)
    grown = {name: value for name, value in result["growth_mb"].items() if value > GROWTH}
    print(f"{options.events:,} events in {result['seconds']:.0f} s; growth {result['growth_mb']}, allowed {GROWTH} MB")
    sys.exit(f"memory has grown: {grown}" if grown else 0)
