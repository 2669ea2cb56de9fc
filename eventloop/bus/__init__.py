"""The bus: subscriptions with priorities and filters, compiled to one function for each event."""

from eventloop.bus.bus import Bus, mark_ranges
from eventloop.bus.describe import BusStats, Description
from eventloop.bus.guests import GuestHook, GuestKind, register_guests
from eventloop.bus.handler import HandlerOptions, StreamOptions
from eventloop.bus.hook import Hook, mount
from eventloop.bus.hosts import HostKind, register_host
from eventloop.bus.priority import Priority
from eventloop.bus.stream import Stream
from eventloop.bus.subscription import Stats, Subscription
from eventloop.bus.watch import Watch

__all__ = [
    "Bus",
    "BusStats",
    "Description",
    "GuestHook",
    "GuestKind",
    "HandlerOptions",
    "Hook",
    "HostKind",
    "Priority",
    "Stats",
    "Stream",
    "StreamOptions",
    "Subscription",
    "Watch",
    "mark_ranges",
    "mount",
    "register_guests",
    "register_host",
]
