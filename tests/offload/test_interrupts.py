"""Thousands of Ctrl-C, at arbitrary instructions of a publisher: every event is accounted for, no wake-up is lost."""

import random

import pytest
import torch

from eventloop import AfterTrainIter, Bus, Progress

from . import workers

STRIKES = 2000


def in_order(events) -> None:
    workers.act_on_all(events)


async def in_order_async(events) -> None:
    workers.act_on_all(events)


def values_in_order(values) -> None:
    for value in values:
        workers.act(AfterTrainIter(progress=Progress(iter=int(value)), outputs={}))


def subscribe(bus: Bus, kind: str):
    options = {"batch": 64, "linger": 0.0002, "queue": 16}
    match kind:
        case "async":
            return bus.on("after_train_iter", in_order_async, **options)
        case "captured":
            capture = lambda event: event.run  # noqa: E731
            return bus.on("after_train_iter", values_in_order, offload="thread", capture=capture, max_bytes=40, **options)
        case "process":
            return bus.on("after_train_iter", workers.act_on_all, offload="process", **options)
        case _:
            return bus.on("after_train_iter", in_order, offload="thread", **options)


@pytest.mark.parametrize("kind", ["async", "thread", "captured", "process"])
def test_thousands_of_interrupts_lose_nothing(kind, quick_workers, no_worker_is_left, ctrl_c):
    bus = Bus()
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
