"""A module of configurations, as ``--module`` of torchtitan's command line names one."""

from torchtitan.trainer import Trainer

from trainbus import TrainbusCheckpointManager


def ours():
    return Trainer.Config(checkpoint=TrainbusCheckpointManager.Config(interval=500, keep_latest_k=5))
