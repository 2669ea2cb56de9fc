"""Events: the mount points of a run, the base class, and the view of the run in each event."""

from eventloop.events import mount_points as catalogue
from eventloop.events.event import Event, Live, Progress, Scalars, Stage
from eventloop.events.mount_points import *  # noqa: F403 - every mount point that trainbus declares
from eventloop.events.run_view import RunView
from eventloop.events.shared import Shared, Slot

__all__ = ["Event", "Live", "Progress", "RunView", "Scalars", "Shared", "Slot", "Stage"]
__all__ += catalogue.__all__  # type: ignore[attr-defined]  # hidden from type checkers there
