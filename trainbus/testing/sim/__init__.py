"""A simulated accelerator: two devices ``sim:0`` and ``sim:1``, in pure Python, whose streams run late."""

from trainbus.testing.sim.kernels import NAME, is_pinned, pinned
from trainbus.testing.sim.module import module
from trainbus.testing.sim.streams import ORDERS, Event, HostWait, Order, Stream, no_waits, reset, waits

__all__ = [
    "NAME",
    "ORDERS",
    "Event",
    "HostWait",
    "Order",
    "Stream",
    "is_pinned",
    "module",
    "no_waits",
    "pinned",
    "reset",
    "waits",
]
