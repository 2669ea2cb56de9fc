"""The events: one class for each mount point, the bases of your own, and what they carry."""

from typing import TYPE_CHECKING

from trainbus.eventloop import events
from trainbus.eventloop.events import *  # noqa: F403
from trainbus.eventloop.events.mount_points import *  # noqa: F403

if not TYPE_CHECKING:  # type checkers take what is imported by *
    __all__ = [*events.__all__]
