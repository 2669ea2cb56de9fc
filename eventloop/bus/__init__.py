"""The bus: subscriptions with priorities and filters, compiled to one function for each event."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.eventloop.bus.bus import Bus, mark_ranges
    from trainbus.eventloop.bus.describe import BusStats, Description
    from trainbus.eventloop.bus.guests import GuestHook, GuestKind, register_guests
    from trainbus.eventloop.bus.handler import HandlerOptions, StreamOptions
    from trainbus.eventloop.bus.hook import Hook, mount
    from trainbus.eventloop.bus.hosts import HostKind, leader_of, register_host
    from trainbus.eventloop.bus.priority import Priority
    from trainbus.eventloop.bus.stream import Stream
    from trainbus.eventloop.bus.subscription import Stats, Subscription
    from trainbus.eventloop.bus.watch import Watch
else:
    __getattr__, __dir__ = lazy(__name__)

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
    "leader_of",
    "mark_ranges",
    "mount",
    "register_guests",
    "register_host",
]
