"""A run in a worker of Ray Train: its folder is Ray's storage path, and Ray is told of its metrics and checkpoints."""

from trainbus.bridges.ray.folders import searched_folders
from trainbus.bridges.ray.hook import RayTrainHook

__all__ = ["RayTrainHook", "searched_folders"]
