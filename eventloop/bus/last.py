"""What comes last in a hook: its ``after_run`` and what it has deferred, when all its lanes are empty."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from trainbus.eventloop.bus.routes import caller
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.eventloop.errors import LaneFullError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload import Deadline, HookLanes, Runtime

log = get_logger()


class Last:
    """A deferred function of a hook with lanes. It waits for them once: what Ctrl-C interrupts is called again."""

    def __init__(self, wait: Callable[[], object], undo: Callable[[], object]) -> None:
        self._wait = wait
        self._undo = undo
        self._waits = True
        self.__qualname__ = getattr(undo, "__qualname__", repr(undo))

    def __call__(self) -> object:
        """Wait, unless an earlier call has begun to, and call the function."""
        waits, self._waits = self._waits, False
        if waits:
            self._wait()
        return self._undo()


def calling_hook(bus: object) -> Subscription | None:
    """Return the subscription of a hook with lanes on this bus whose method calls this, if one does."""
    found = caller()
    return found if found is not None and found.siblings is not None and found.is_on(bus) else None


def wait_for(lanes: HookLanes, runtime: Runtime, deadline: Deadline, interrupt: Callable[[], object]) -> None:
    """Wait until the lanes are empty. Log what is left where this thread must not wait, or the deadline comes first."""
    if runtime.inside or runtime.in_host_loop:
        why = "this thread runs handlers of the bus, and they would wait for each other: train on another, as loop.arun() does"
    else:
        with suppress(LaneFullError):  # the run that ends after an exception has waited long enough
            if lanes.wait(deadline, interrupt):
                return
        why = "they took longer than drain_timeout= (after an exception, abort_timeout=) of the bus"
    if left := lanes.pending():
        log.warning(
            f"a hook ends before its offloaded methods have handled all events, because {why}",
            handler=lanes.label,
            events=dict(left),
        )
