"""Who hears an event: subscriptions, their priorities and filters, and the function compiled of them."""

from eventloop.bus.bus import Bus

__all__ = ["Bus"]
