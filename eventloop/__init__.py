"""The mechanism of trainbus: events, the bus, offloading, the training loop, checkpoints. The hooks are in ``trainbus.hooks``.

It exports the names that a user of the bus and the loop types. Mount-point classes are in ``trainbus.eventloop.events``,
further errors in ``trainbus.eventloop.errors``, and types that appear in signatures only in their subpackages.
"""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.eventloop.bus import Bus, Hook, Priority, Stream, Subscription, Watch, mount
    from trainbus.eventloop.checks import check_options
    from trainbus.eventloop.errors import (
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
    from trainbus.eventloop.events import Event, Live, Progress, Scalars
    from trainbus.eventloop.events.event import mount_points
    from trainbus.eventloop.log import get_logger
    from trainbus.eventloop.offload import from_json, from_msgpack
    from trainbus.eventloop.registry import register
    from trainbus.eventloop.training import GlobalBatchSampler, Metric, Run, SeededDataset, TrainLoop, Update, load_weights
else:
    __getattr__, __dir__ = lazy(__name__)

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
    "TrainbusError",
    "TrainingError",
    "UnknownEventError",
    "Update",
    "Watch",
    "check_options",
    "from_json",
    "from_msgpack",
    "get_logger",
    "load_weights",
    "mount",
    "mount_points",
    "register",
]
