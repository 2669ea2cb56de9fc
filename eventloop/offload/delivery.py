"""``Delivery``: what a consumer has to know of a lane and its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from trainbus.eventloop.events import Event
from trainbus.eventloop.offload.lane import Lane

Sources = list[tuple[type[Event], Any]]
"""Kind and progress of events, as far as they are known."""


class Delivery(msgspec.Struct, frozen=True):
    """A lane, its handler, and the functions to call with an error and the events of that call."""

    lane: Lane
    handler: Callable[[Any], Any]  # gets one item of the lane, or with ``batch`` a list of them
    failed: Callable[[Exception, Sources], None]  # for every exception of the handler, before the failure is counted
    broken: Callable[[BaseException, Sources], None]  # for what ends the consumer (``SystemExit`` in a handler, say)
    batch: int | None = None  # most items per call
    loud: bool = True  # whether items left when the bus closes are an error; else they are logged
    is_async: bool = False
    timeout: float | None = None  # seconds per call
    in_process: bool = False  # whether it is called in a worker process
