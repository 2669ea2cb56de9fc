"""Events with numbers, and handlers that wait until they are released."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import anyio

from trainbus.eventloop import Bus, Event, Progress
from trainbus.eventloop.events import AfterTrainIter


def iteration(i: int, **fields: Any) -> AfterTrainIter:
    return AfterTrainIter(progress=Progress(iter=i), batch_idx=i, **fields)


def publish_all(bus: Bus, numbers: Iterable[int], event: Callable[[int], Event] = iteration) -> None:
    for number in numbers:
        bus.publish(event(number))


def offload(bus: Bus, function: Callable[[Any], object], kind: str, event: Any = "after_train_iter", **options: Any):
    """Subscribe ``function`` as an async handler, or as a plain one that runs inline, on a thread or in a process."""

    async def handler(what):
        return function(what)

    if kind == "async":
        return bus.on(event, handler, **options)
    return bus.on(event, function, offload=kind, **options)


def held(bus: Bus, kind: str = "thread", *, event="after_train_iter", number=lambda event: event.batch_idx, **options: Any):
    """Subscribe a handler that waits in its first event. Returns its subscription, what it heard, started, release."""
    heard: list[int] = []
    started, release = threading.Event(), threading.Event()

    def handler(event):
        heard.append(number(event))
        started.set()
        release.wait()

    async def task(event):
        heard.append(number(event))
        started.set()
        while not release.is_set():
            await anyio.sleep(0.001)

    if kind == "thread":
        return bus.on(event, handler, offload="thread", **options), heard, started, release
    return bus.on(event, task, **options), heard, started, release
