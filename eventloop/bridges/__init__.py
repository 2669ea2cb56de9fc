"""The same bus in another library's trainer: ``bus.attach(trainer)`` returns a :class:`Bridge`.

A bridge publishes the mount points of a :class:`HostedRun` when the trainer passes them. Each trainer has a separate module
here, which is imported when such a trainer is attached.
"""

from eventloop.bridges.bridge import Bridge, attach, connect
from eventloop.bridges.hosted import HostedDriver, HostedRun
from eventloop.bridges.lightning.saver import TrainbusCheckpointIO

__all__ = ["Bridge", "HostedDriver", "HostedRun", "TrainbusCheckpointIO", "attach", "connect"]
