"""A run in a worker of Ray Train: its folder is Ray's storage path, and Ray is told of its metrics and checkpoints."""

from eventloop.bridges.ray.folders import searched_folders
from eventloop.bridges.ray.reports import RayReports
from eventloop.bridges.ray.worker import RayWorker

__all__ = ["RayReports", "RayWorker", "searched_folders"]
