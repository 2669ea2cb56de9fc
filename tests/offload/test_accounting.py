"""published == delivered + failed + dropped + pending, at every moment, in every mode, whatever happens."""

import threading
import time

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.bus import Stats
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.offload import process

from ..waiting import meanwhile, on_threads
from . import workers

FAILS, DIES, HANGS = workers.DEEDS.index("raise"), workers.DEEDS.index("exit"), workers.DEEDS.index("hang")


def check(stats: Stats) -> None:
    assert stats.published == stats.delivered + stats.failed + stats.dropped + stats.pending
    assert min(stats.delivered, stats.failed, stats.dropped, stats.pending, stats.bytes) >= 0


def check_all(bus: Bus) -> None:
    """In ``bus.stats()`` and in the hook table."""
    for stats in bus.stats().values():
        check(stats)
    for row in bus.describe(stats=True).rows:
        check(row.stats)


def subscribe(bus: Bus, mode: str, released: threading.Event, options: dict):
    """Subscribe a handler that does what its event says: nothing, fail, hang, end its worker."""
    if mode == "process":
        handler = workers.act_on_all if "batch" in options else workers.act
        return bus.on("after_train_iter", handler, offload="process", **options)

    def deeds(what) -> set[int]:
        return {int(event.outputs["do"]) for event in (what if isinstance(what, list) else [what])}

    def handle(what) -> None:
        if HANGS in deeds(what):
            released.wait()
        if deeds(what) - {0}:
            raise ValueError

    async def handle_async(what) -> None:
        if HANGS in deeds(what):
            await anyio.sleep_forever()
        if deeds(what) - {0}:
            raise ValueError

    if mode == "async":
        return bus.on("after_train_iter", handle_async, **options)
    return bus.on("after_train_iter", handle, offload="thread" if mode == "thread" else "inline", **options)


@pytest.mark.long
@given(
    mode=st.sampled_from(["async", "thread", "process"]),
    full=st.sampled_from(["block", "drop_old", "drop_new", "latest"]),
    queue=st.integers(1, 6),
    batch=st.none() | st.integers(1, 4),
    linger=st.sampled_from([0, 0.001]),
    deeds=st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, FAILS, DIES]), min_size=1, max_size=20),
    hangs_at=st.none() | st.none() | st.none() | st.integers(0, 20),
    disable_after=st.none() | st.none() | st.integers(1, 2),
    cancels_at=st.none() | st.integers(0, 20),
)
def test_the_counts_add_up_at_every_moment(mode, full, queue, batch, linger, deeds, hangs_at, disable_after, cancels_at):
    context = workers.quick()
    options = {"full": full, "queue": queue, "linger": linger, "on_error": "log"}
    options |= {"batch": batch} if batch else {}
    options |= {"disable_after": disable_after} if disable_after else {}
    if hangs_at is not None and hangs_at < len(deeds):
        deeds = [*deeds[:hangs_at], HANGS, *deeds[hangs_at + 1 :]]
        options["timeout"] = 0.3
    bus, released = Bus(), threading.Event()
    subscription = subscribe(bus, mode, released, options)
    torn: list[AssertionError] = []

    def watch() -> None:
        try:
            check_all(bus)
            check(subscription.stats)
        except AssertionError as error:
            torn.append(error)
        time.sleep(0.0005)

    published = 0
    with process.CONTEXT.replaced(context), capture_logs() as logs:
        try:
            with meanwhile(watch), bus:
                for i, deed in enumerate(deeds):
                    if i == cancels_at:
                        subscription.cancel()
                    published += subscription.active
                    bus.publish(AfterTrainIter(progress=Progress(iter=i), outputs={"do": float(deed)}))
                    check(subscription.stats)
        finally:
            released.set()
    assert not torn
    stats = subscription.stats
    check(stats)
    assert stats.pending == 0
    assert stats.published <= published
    bad, timely = sum(deed != 0 for deed in deeds[:published]), "timeout" not in options
    if full == "block" and not disable_after:
        assert stats.published == published
        assert stats.dropped == 0
        if batch is None and timely:
            assert (stats.delivered, stats.failed) == (published - bad, bad)
        assert stats.failed >= -(-bad // (batch or 1))
        assert stats.failed <= bad * (batch or 1) or not timely  # a batch fails as a whole
    if disable_after and batch is None and (cancels_at is None or cancels_at >= len(deeds)):
        retired = sum(line.get("id") == "handler-retired" for line in logs)
        assert retired == (stats.failed == disable_after)
        assert stats.failed <= disable_after
        assert not (retired and subscription.active)
        assert stats.failed == min(bad, disable_after) or full != "block" or not timely


@given(
    full=st.sampled_from(["block", "drop_old", "drop_new", "latest"]),
    queue=st.integers(1, 6),
    batch=st.none() | st.integers(1, 4),
    budget=st.integers(10, 40),
    sizes=st.lists(st.integers(0, 10), min_size=1, max_size=20),
    fails=st.sets(st.integers(0, 20), max_size=3),
    publishers=st.integers(1, 3),
)
def test_bytes_never_exceed_the_budget_and_are_all_released(full, queue, batch, budget, sizes, fails, publishers):
    bus = Bus()

    def handle(what) -> None:
        values = what if isinstance(what, list) else [what]
        if any(len(tensor) in fails for tensor in values):
            raise ValueError

    options = {"full": full, "queue": queue, "max_bytes": 4 * budget, "on_error": "log", "linger": 0, "batch": batch}
    subscription = bus.on("after_train_iter", handle, offload="thread", capture=lambda event: event.run, **options)

    def publish(_: int) -> None:
        for size in sizes:
            bus.publish(AfterTrainIter(run=torch.zeros(size), progress=Progress()))
            stats = subscription.stats
            check(stats)
            assert stats.bytes <= 4 * budget

    with capture_logs(), bus:
        on_threads(publish, *range(publishers))
    stats = subscription.stats
    assert stats.published == publishers * len(sizes)
    assert stats.pending == stats.bytes == 0
    if full == "block":
        assert stats.dropped == 0


@pytest.mark.parametrize("timing", [False, True])
def test_inline_handlers_add_up_too(timing):
    bus = Bus(timing=timing)
    subscription = subscribe(bus, "inline", threading.Event(), {"on_error": "log"})
    with capture_logs():
        for i in range(6):
            bus.publish(AfterTrainIter(progress=Progress(iter=i), outputs={"do": float(FAILS if i == 2 else 0)}))
            check_all(bus)
    stats = subscription.stats
    assert stats.failed == 1
    assert (stats.published, stats.delivered) == ((6, 5) if timing else (1, 0))
