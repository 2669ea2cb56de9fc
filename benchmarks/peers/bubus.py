"""bubus: pydantic events on an asyncio bus.

It dispatches on the thread of its loop only, so other publishers call into the loop.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from bubus import BaseEvent, EventBus

from benchmarks.peers import HandOff, HandOffs, Receive
from benchmarks.peers.stdlib import running_loop


class AfterTrainIterEvent(BaseEvent[None]):
    at: int


def offload() -> Mapping[str, HandOffs]:
    return {"bubus": bus}


@contextmanager
def bus(receive: Receive) -> Iterator[HandOff]:
    async def handle(event: AfterTrainIterEvent) -> None:
        receive(event)

    async def start() -> EventBus:
        # With its default history of 50 it refuses more than 100 events that wait.
        events = EventBus("benchmark", max_history_size=None)
        events.on(AfterTrainIterEvent, handle)
        return events

    with running_loop() as loop:
        events = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield HandOff(partial(loop.call_soon_threadsafe, events.dispatch), make=make)
        asyncio.run_coroutine_threadsafe(events.stop(clear=True), loop).result()


def make(at: int) -> AfterTrainIterEvent:
    return AfterTrainIterEvent(at=at)
