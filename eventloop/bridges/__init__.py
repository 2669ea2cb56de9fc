"""The same bus in another library's trainer: ``bus.attach(trainer)`` returns a :class:`Bridge`.

A bridge gives a run a :class:`TrainerHost`, and publishes its mount points when the trainer passes them. Each library has a
folder here, whose modules are imported when such a trainer is attached.
"""

from eventloop.bridges.bridge import Bridge, attach
from eventloop.bridges.hosted import TrainerHost
from eventloop.bridges.lightning.saver import TrainbusCheckpointIO
from eventloop.bridges.uvicorn import shuts_down
from eventloop.bus import HostKind, register_host
from eventloop.offload import register_server
from eventloop.training.replicas import register_replicas

__all__ = ["Bridge", "TrainbusCheckpointIO", "TrainerHost", "attach"]

_LIGHTNING = "eventloop.bridges.lightning.host:LightningBridge"
register_host(
    HostKind("lightning.pytorch.trainer.trainer.Trainer", _LIGHTNING, "lightning.Trainer"),
    HostKind("pytorch_lightning.trainer.trainer.Trainer", _LIGHTNING, "lightning.Trainer"),
    HostKind("transformers.trainer.Trainer", "eventloop.bridges.transformers.host:TransformersBridge", "transformers.Trainer"),
    HostKind("ignite.engine.engine.Engine", "eventloop.bridges.ignite.host:IgniteBridge", "ignite.engine.Engine"),
    HostKind("accelerate.accelerator.Accelerator", "eventloop.bridges.accelerate.host:AcceleratorSaves", loops=False),
)
register_replicas("torchft.manager.Manager", "eventloop.bridges.torchft.host:ManagedReplicas")
register_server(shuts_down)
