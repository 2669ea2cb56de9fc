"""Events: the mount points of a run, the base class, and the view of the run in each event."""

from trainbus.eventloop.events import mount_points as catalogue
from trainbus.eventloop.events.event import Event, Live, Progress, Scalars, Stage
from trainbus.eventloop.events.mount_points import *  # noqa: F403 - every mount point that trainbus declares
from trainbus.eventloop.events.run_view import RunView
from trainbus.eventloop.events.shared import Shared, Slot

__all__ = ["Event", "Live", "Progress", "RunView", "Scalars", "Shared", "Slot", "Stage"]
__all__ += catalogue.__all__  # type: ignore[attr-defined]  # hidden from type checkers there
