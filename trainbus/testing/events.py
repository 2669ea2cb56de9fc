"""``capture_events``: record what a bus publishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from trainbus.eventloop.bus import Bus, Subscription
from trainbus.eventloop.events import Event


class CapturedEvents(list[Any]):
    """The events so far, in the order in which they came; or what ``read`` returned for each."""

    subscription: Subscription

    @property
    def mount_points(self) -> list[str]:
        """The mount points of the events."""
        return [event.mount_point for event in self]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.subscription.cancel()


def capture_events(
    bus: Bus, *events: type[Event] | str, read: Callable[[Any], Any] | None = None, **options: Any
) -> CapturedEvents:
    """Record what a bus publishes, from now on or for a ``with`` block.

        with capture_events(bus) as events:
            loop.run()
        assert events.mount_points[0] == "before_run"

    Args:
        bus: the bus.
        events: classes of events or names of mount points; all events by default.
        read: keep what this returns for an event instead of the event, whose run, model and batch change after it:
            ``read=lambda event: event.run.model.training``.
        options: other options of :meth:`trainbus.eventloop.Bus.on`, such as ``priority`` and ``every``.
    """
    captured = CapturedEvents()

    def capture(event: Event) -> None:
        captured.append(event if read is None else read(event))

    subscribe: Callable[..., Subscription] = bus.on
    captured.subscription = subscribe(*events or (Event,), capture, **options)
    return captured
