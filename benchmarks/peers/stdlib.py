"""The standard library's ways to hand an object to another thread or to an event loop on it."""

import asyncio
import logging
import logging.handlers
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from benchmarks.peers import HandOff, HandOffs, Receive

FLOOR = "deque.append"


def offload() -> Mapping[str, HandOffs]:
    return {
        FLOOR: append,
        "SimpleQueue, sleeping thread": simple_queue,
        "call_soon_threadsafe": call_soon,
        "run_coroutine_threadsafe": run_coroutine,
        "logging QueueHandler": queue_handler,
    }


@contextmanager
def append(receive: Receive) -> Iterator[HandOff]:
    """Append without a consumer: the least cost of handing over."""
    yield HandOff(deque().append, delivers=False)


@contextmanager
def simple_queue(receive: Receive) -> Iterator[HandOff]:
    waiting: queue.SimpleQueue[object] = queue.SimpleQueue()

    def consume() -> None:
        while (event := waiting.get()) is not None:
            receive(event)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    yield HandOff(waiting.put)
    waiting.put(None)
    thread.join()


@contextmanager
def call_soon(receive: Receive) -> Iterator[HandOff]:
    with running_loop() as loop:
        yield HandOff(partial(loop.call_soon_threadsafe, receive))


@contextmanager
def run_coroutine(receive: Receive) -> Iterator[HandOff]:
    async def handle(event: object) -> None:
        receive(event)

    with running_loop() as loop:
        yield HandOff(lambda event: asyncio.run_coroutine_threadsafe(handle(event), loop))


@contextmanager
def queue_handler(receive: Receive) -> Iterator[HandOff]:
    """A logger whose records are handled by a QueueListener's thread."""

    class Receiver(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            receive(record)

    waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger = logging.Logger("benchmarks.offload", logging.INFO)
    logger.addHandler(logging.handlers.QueueHandler(waiting))
    listener = logging.handlers.QueueListener(waiting, Receiver())
    listener.start()
    yield HandOff(lambda event: logger.info("iteration", extra={"at": event.at}))
    listener.stop()


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An asyncio event loop on a separate thread, as a training script would run one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
