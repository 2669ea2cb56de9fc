"""Thousands of Ctrl-C, at arbitrary instructions of a publisher: every event is accounted for, no wake-up is lost."""

import itertools
import random
import threading
from pathlib import Path

import pytest
import torch

from trainbus import eventloop
from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.offload import Runtime

from ..handlers import offload
from ..strikes import strikes_at
from . import workers

STRIKES = 2000


def values_in_order(values) -> None:
    for value in values:
        workers.act(AfterTrainIter(progress=Progress(iter=int(value)), outputs={}))


def subscribe(bus: Bus, kind: str):
    options = {"batch": 64, "linger": 0.0002, "queue": 16}
    if kind == "captured":
        options |= {"capture": lambda event: event.run, "max_bytes": 40}
        return bus.on("after_train_iter", values_in_order, offload="thread", **options)
    return offload(bus, workers.act_on_all, kind, **options)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["async", "thread", "captured", "process"])
def test_thousands_of_interrupts_lose_nothing(bus, kind, quick_workers, no_worker_is_left, ctrl_c):
    subscription = subscribe(bus, kind)
    workers.heard.clear()
    delays = random.Random(3)
    tensor = torch.zeros(1)
    published = 0
    with bus:
        while ctrl_c.strikes < STRIKES:
            event = AfterTrainIter(progress=Progress(iter=published), run=tensor.fill_(published), outputs={})
            published += 1
            ctrl_c.once(delays.uniform(2e-6, 60e-6))  # somewhere in the publish, or just after it
            ctrl_c.publish(bus, event)
        ctrl_c.every(0)
        assert bus.drain(timeout=30).pending == 0
    stats = subscription.stats
    assert stats.failed == stats.dropped == stats.pending == stats.bytes == 0  # twice, or out of order, would be a failure
    assert published - ctrl_c.strikes <= stats.published == stats.delivered <= published


def test_an_interrupt_at_any_line_of_starting_threads_leaks_and_loses_nothing(no_worker_is_left):
    for at in itertools.count():
        heard: list[object] = []
        bus = Bus()
        subscriptions = [offload(bus, heard.append, kind, linger=0) for kind in ("thread", "async")]
        if not strikes_while_it_opens(bus, at):
            break
        with bus:
            for index in range(3):
                bus.publish(AfterTrainIter(progress=Progress(iter=index), outputs={}))
        assert [subscription.stats.delivered for subscription in subscriptions] == [3, 3]
        assert len(heard) == 6
    assert at > 15
    bus.close()


def strikes_while_it_opens(bus: Bus, at: int) -> bool:
    # No function with a lock: where a trace function raises as `with` ends, unlike Ctrl-C, the lock is not released.
    names = {"serve", "_start", "start"}
    ours = str(Path(eventloop.__file__).parent)
    struck = strikes_at(at, bus.open, lambda frame: frame.f_code.co_name in names and frame.f_code.co_filename.startswith(ours))
    assert bus.state == ("idle" if struck else "open")
    return struck


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_a_thread_is_started_leaves_one_consumer(bus, after, monkeypatch, no_worker_is_left):
    heard: list[object] = []
    subscription = bus.on("after_train_iter", heard.append, offload="thread", linger=0)
    real = threading.Thread.start

    def start(thread):
        monkeypatch.undo()
        if after:  # as if it struck while start() waits for the thread, which runs
            real(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        bus.open()
    with bus:
        for index in range(3):
            bus.publish(AfterTrainIter(progress=Progress(iter=index), outputs={}))
    assert subscription.stats.delivered == len(heard) == 3


def test_an_interrupt_while_the_bus_closes_leaves_no_thread(bus, monkeypatch, no_worker_is_left):
    real = Runtime.close

    def close(runtime, *arguments, **options):
        monkeypatch.undo()
        raise KeyboardInterrupt

    bus.on("after_train_iter", print, offload="thread")
    offload(bus, print, "async", batch=2)
    monkeypatch.setattr(Runtime, "close", close)
    with pytest.raises(KeyboardInterrupt), bus:
        pass
    assert bus.state == "idle"
    assert Runtime.close is real
