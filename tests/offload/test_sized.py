"""``max_bytes=``: the budget of a lane of captured tensors, in stats and under every policy."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, LaneFullError, Progress
from trainbus.eventloop.events import AfterRun
from trainbus.eventloop.offload import Owned, sized, snapshot
from trainbus.eventloop.offload.snapshot import nbytes

from .. import handlers
from ..failing import fails
from ..handlers import publish_all
from ..waiting import until

KB = torch.zeros(250)  # 1000 bytes


def event(value) -> AfterRun:
    return AfterRun(run=value, progress=Progress())


def numbered(i: int, kilobytes: int = 1) -> AfterRun:
    return event(torch.full((250 * kilobytes,), float(i)))


def held(bus: Bus, **options):
    return handlers.held(
        bus, event="after_run", number=lambda tensor: int(tensor[0]), capture=lambda event: event.run, **options
    )


def test_bytes_are_those_of_tensors_and_arrays_wherever_they_are():
    value = {"a": [KB, (KB, "text")], "b": Owned(np.zeros(10)), "c": KB[:1].expand(100), "d": 3, "e": KB.bool()}
    assert nbytes(value) == 2000 + 80 + 400 + 250


def test_bytes_count_until_the_handler_is_done(bus):
    subscription, _, started, release = held(bus)
    with bus:
        publish_all(bus, range(3), numbered)
        started.wait()
        assert subscription.stats.bytes == 3000
        assert bus.stats()[subscription].bytes == 3000
        release.set()
        bus.drain()
        assert subscription.stats.bytes == 0


@pytest.mark.parametrize(
    ("full", "budget", "kilobytes", "kept"),
    [
        ("drop_old", 3100, [1] * 10, [0, 8, 9]),
        ("drop_new", 3100, [1] * 10, [0, 1, 2]),
        ("latest", 3100, [1] * 10, [0, 9]),
        ("drop_old", 6000, [1, 1, 1, 1, 1, 4], [0, 4, 5]),  # room for a large one
        ("drop_old", 4000, [3, 1, 2], [0, 1]),  # what the handler holds cannot be dropped
    ],
)
def test_policies_apply_to_bytes(bus, full, budget, kilobytes, kept):
    subscription, heard, started, release = held(bus, max_bytes=budget, full=full)
    with bus:
        for i, size in enumerate(kilobytes):
            bus.publish(numbered(i, size))
            started.wait()
            stats = subscription.stats
            assert stats.bytes <= budget
            assert stats.published == stats.delivered + stats.failed + stats.dropped + stats.pending
        release.set()
    assert heard == kept
    stats = subscription.stats
    assert stats.published == len(kilobytes)
    assert stats.dropped == len(kilobytes) - len(kept)
    assert stats.bytes == 0


def test_a_full_budget_may_raise(bus):
    subscription, heard, started, release = held(bus, max_bytes=1500, full="raise")
    with bus:
        bus.publish(numbered(0))
        started.wait()
        with pytest.raises(LaneFullError, match=r"1,000 of max_bytes=1,500 .*1,000"):
            bus.publish(numbered(1))
        release.set()
    assert heard == [0]
    assert subscription.stats.published == 1


@pytest.mark.parametrize("full", ["block", "drop_old", "drop_new", "latest", "raise"])
def test_a_value_larger_than_the_budget_is_an_error(bus, full):
    subscription, _, _, release = held(bus, max_bytes=1500, full=full)
    release.set()
    with bus:
        with pytest.raises(LaneFullError, match=r"2,000 .*max_bytes=1,500"):
            bus.publish(numbered(0, kilobytes=2))
        bus.publish(numbered(1))
    assert subscription.stats.published == subscription.stats.delivered == 1


def test_a_value_that_cannot_be_copied_releases_its_bytes(bus):
    subscription, _, _, release = held(bus, max_bytes=1500)
    release.set()
    with bus:
        for _ in range(3):
            with pytest.raises(TypeError, match="live Linear"):
                bus.publish(event([KB, torch.nn.Linear(1, 1)]))
        assert subscription.stats.bytes == 0
        bus.publish(numbered(1))
    assert subscription.stats.delivered == 1


@pytest.mark.long
def test_failed_and_abandoned_values_release_their_bytes():
    bus = Bus(abort_timeout=0.02)
    subscription, _, started, release = held(bus, on_error="log")
    options = {"capture": lambda event: event.run, "on_error": "log", "batch": 2}
    bus.on("after_run", fails(ValueError), offload="thread", **options)
    with capture_logs(), pytest.raises(KeyError), bus:
        publish_all(bus, range(5), numbered)
        started.wait()
        raise KeyError
    release.set()
    for one in bus.subscriptions:
        assert one.stats.published == 5
        until(lambda one=one: not one.stats.pending)
        assert one.stats.bytes == 0
    assert subscription.stats.dropped


def test_linger_collects_a_batch_and_a_handler_may_ask_for_a_list(bus):
    batches: list[int] = []
    bus.on("after_run", lambda events: batches.append(len(events)), offload="thread", batch=256, linger=0.05)
    with bus:
        bus.publish(event(None))
        bus.drain()
        for _ in range(100):  # while the consumer lingers: it is not woken for each
            bus.publish(event(None))
    assert sum(batches) == 101
    assert len(batches) < 20


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_between_copy_and_queue_releases_the_bytes(bus, monkeypatch, again):
    """It can strike there where torch.compile has replaced the way in which the interpreter calls functions.

    Another one can strike as soon as a function of Python is called to clean up after the first.
    """

    def strike_again(frame, what, _):
        if what == "call" and Path(frame.f_code.co_filename).parent.name == "offload":
            raise KeyboardInterrupt  # which ends the profiling

    def struck(value):
        snapshot.capture(value)
        sys.setprofile(strike_again if again else None)
        raise KeyboardInterrupt

    subscription = bus.on("after_run", lambda tensor: None, offload="thread", capture=lambda event: event.run, max_bytes=1500)
    with bus:
        for i in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(sized, "capture", struck)
                with pytest.raises(KeyboardInterrupt):
                    bus.publish(numbered(i))
            bus.publish(numbered(i))
        assert bus.drain().pending == 0
    assert (subscription.stats.published, subscription.stats.bytes) == (3, 0)
