"""A training that blocks the event loop of a program is told."""

from __future__ import annotations

from functools import cache

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.notebook import in_notebook
from trainbus.eventloop.offload import threadsafe_call

log = get_logger()


def tell_if_it_blocks() -> None:
    """Log once in a process that a training blocks this thread's event loop.

    Not in a notebook: its kernel runs each cell in an event loop, which has nothing else to do.
    """
    try:
        threadsafe_call()
    except RuntimeError:  # no event loop runs here
        return
    if not in_notebook():
        _tell()


@cache
def _tell() -> None:
    log.warning(
        "loop.run() blocks the event loop of this thread, and its other tasks wait for the end; in async code, use "
        "`await loop.arun()`"
    )
