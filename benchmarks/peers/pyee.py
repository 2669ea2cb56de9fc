"""pyee: string-named events on an emitter; its asyncio emitter for coroutine handlers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from pyee import EventEmitter
from pyee.asyncio import AsyncIOEventEmitter

from benchmarks.peers import HandOff, HandOffs, Receive, Statement, no_op_handlers
from benchmarks.peers.stdlib import running_loop


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    emitter = EventEmitter()
    for handler in no_op_handlers(handlers):
        emitter.on("after_train_iter", handler)
    arguments = "event" if handlers else "run, progress, 0, None, None"
    return Statement(f'emitter.emit("after_train_iter", {arguments})', {**names, "emitter": emitter})


def offload() -> Mapping[str, HandOffs]:
    return {"pyee AsyncIOEventEmitter": asyncio_emitter}


@contextmanager
def asyncio_emitter(receive: Receive) -> Iterator[HandOff]:
    """Publish from another thread by calling into the loop, because the emitter makes a task per event."""

    async def handle(event: object) -> None:
        receive(event)

    with running_loop() as loop:
        emitter = AsyncIOEventEmitter(loop=loop)
        emitter.on("after_train_iter", handle)
        yield HandOff(partial(loop.call_soon_threadsafe, emitter.emit, "after_train_iter"))
