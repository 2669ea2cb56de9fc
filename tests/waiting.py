"""Tests wait for conditions, and for threads, never for times."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition does not come about"
        time.sleep(0.005)


@contextmanager
def meanwhile(function: Callable[[], object]) -> Iterator[None]:
    """Call a function again and again, on a thread of its own, at least once."""
    over = threading.Event()

    def call() -> None:
        function()
        while not over.is_set():
            function()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def on_threads(function: Callable[..., object], *arguments: object) -> None:
    """Call a function with each argument at the same time, on a thread each, to the end of all."""
    threads = [threading.Thread(target=function, args=(one,)) for one in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
