"""The mechanism of trainbus: events, the bus, offloading, the training loop, checkpoints. The hooks are in ``hooks``.

It exports the names that a user of the bus and the loop types. Mount-point classes are in ``eventloop.events``, further errors
in ``eventloop.errors``, and types that appear in signatures only in their subpackages.
"""

from eventloop.bridges import TrainbusCheckpointIO, attach
from eventloop.bus import Bus, Hook, Priority, Stream, Subscription, Watch, mount
from eventloop.bus.recording import register_recorder
from eventloop.checks import check_options
from eventloop.config import add_hooks, register
from eventloop.errors import (
    BusStateError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    HandlerTimeoutError,
    LaneFullError,
    LiveFieldError,
    OffloadError,
    RunCancelled,
    RunPreempted,
    SubscribeError,
    TrainbusError,
    TrainingError,
    UnknownEventError,
)
from eventloop.events import Event, Live, Progress, Scalars
from eventloop.events.event import mount_points
from eventloop.log import get_logger
from eventloop.offload import from_json, from_msgpack
from eventloop.training import GlobalBatchSampler, Metric, Run, SeededDataset, TrainLoop, Update, load_weights

__all__ = [
    "Bus",
    "BusStateError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "Event",
    "GlobalBatchSampler",
    "HandlerTimeoutError",
    "Hook",
    "LaneFullError",
    "Live",
    "LiveFieldError",
    "Metric",
    "OffloadError",
    "Priority",
    "Progress",
    "Run",
    "RunCancelled",
    "RunPreempted",
    "Scalars",
    "SeededDataset",
    "Stream",
    "SubscribeError",
    "Subscription",
    "TrainLoop",
    "TrainbusCheckpointIO",
    "TrainbusError",
    "TrainingError",
    "UnknownEventError",
    "Update",
    "Watch",
    "add_hooks",
    "attach",
    "check_options",
    "from_json",
    "from_msgpack",
    "get_logger",
    "load_weights",
    "mount",
    "mount_points",
    "register",
]

register_recorder("eventloop.observe:BusRecorder")
