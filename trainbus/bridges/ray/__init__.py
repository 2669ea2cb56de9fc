"""A run in a worker of Ray Train: its folder is Ray's storage path, and Ray is told of its metrics and checkpoints."""

from trainbus.bridges.ray.folders import searched_folders
from trainbus.bridges.ray.reports import RayReports
from trainbus.bridges.ray.worker import RayWorker

__all__ = ["RayReports", "RayWorker", "searched_folders"]
