"""The same bus in another library's trainer: ``attach(bus, trainer)`` returns a :class:`Bridge`.

A bridge gives a run a :class:`TrainerHost`, and publishes its mount points when the trainer passes them. Each library has a
folder here, whose modules are imported when such a trainer is attached.
"""

from trainbus.bridges.bridge import Bridge, attach
from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.lightning.saver import TrainbusCheckpointIO
from trainbus.bridges.matplotlib import draw
from trainbus.bridges.uvicorn import shuts_down
from trainbus.eventloop.bus import HostKind, register_host
from trainbus.eventloop.media import register_figures
from trainbus.eventloop.offload import register_server
from trainbus.eventloop.privates import register_wrapper

__all__ = ["Bridge", "TrainbusCheckpointIO", "TrainerHost", "attach"]

_LIGHTNING = "trainbus.bridges.lightning.host:LightningBridge"
_TORCHTITAN = "trainbus.bridges.torchtitan.host:TorchtitanBridge"
register_host(
    HostKind("lightning.pytorch.trainer.trainer.Trainer", _LIGHTNING, "lightning.Trainer"),
    HostKind("pytorch_lightning.trainer.trainer.Trainer", _LIGHTNING, "lightning.Trainer"),
    HostKind("transformers.trainer.Trainer", "trainbus.bridges.transformers.host:TransformersBridge", "transformers.Trainer"),
    HostKind("ignite.engine.engine.Engine", "trainbus.bridges.ignite.host:IgniteBridge", "ignite.engine.Engine"),
    HostKind(
        "accelerate.accelerator.Accelerator",
        "trainbus.bridges.accelerate.host:AcceleratorSaves",
        "accelerate.Accelerator",
        option="accelerator",
        leads="trainbus.bridges.accelerate.entry:AcceleratedLoop",
    ),
    HostKind("torchtitan.trainer.Trainer", _TORCHTITAN, "torchtitan.trainer.Trainer"),
    HostKind("torchtitan.train.Trainer", _TORCHTITAN, "torchtitan.trainer.Trainer"),  # of 0.2, which the bridge refuses
    HostKind(
        "torchft.manager.Manager",
        name="torchft.Manager",
        option="replicas",
        leads="trainbus.bridges.torchft.host:ManagedReplicas",
    ),
)
register_server(shuts_down)
register_figures("matplotlib", draw)
register_wrapper("DeepSpeedEngine", "module")
