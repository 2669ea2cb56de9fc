"""``RayWorker``: what a worker of Ray Train can ask and tell Ray."""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from trainbus.bridges.ray import privates
from trainbus.eventloop.checkpoint import AnyPath, RemotePath, as_path
from trainbus.eventloop.errors import CheckpointError, ConfigurationError, cannot_import
from trainbus.eventloop.world import is_joined

_PROTOCOLS: Final = {"s3": "s3", "gcs": "gs", "abfs": "abfs"}
"""By the names that pyarrow has for its own file systems."""


class RayWorker:
    """This process as a worker of Ray Train.

    :meth:`report` and :meth:`notice` are collectives: all workers make the same calls in the same order, on one thread each.

    Raises:
        ConfigurationError: this process is not a worker of Ray Train, or Ray lacks an undocumented name that is needed.
    """

    def __init__(self) -> None:
        try:
            self._train: Any = import_module("ray.train")
            context = self._train.get_context()
        except ImportError as error:
            raise cannot_import("RayTrainHook", "Ray", "ray", error, "ray", "ray.train") from error
        except (RuntimeError, DeprecationWarning):  # Ray's checks of the caller; the second in a function of Ray Tune
            context = None
        if context is None or not hasattr(self._train, "get_preemption_info"):
            raise ConfigurationError(
                "RayTrainHook needs a worker of Ray Train: use the bus in the train_func of a TorchTrainer (Ray 2.60 or later, "
                "without RAY_TRAIN_V2_ENABLED=0), or remove the hook; a function of Ray Tune calls tune.report() itself"
            )
        try:
            privates.check(context)
        except NotImplementedError as error:
            advice = "give ScalingConfig a num_workers of at least 1, or remove RayTrainHook"
            raise ConfigurationError(f"Ray's local mode has no storage path: {advice}") from error
        self.rank: int = context.get_world_rank()
        self.size: int = context.get_world_size()
        self._files, self._folder = privates.storage_of(context)
        self._found: AnyPath | None = None
        if self.size > 1 and not is_joined():
            raise ConfigurationError(
                f"Ray has {self.size} workers and torch has no process group: each would be a run of its own; use TorchTrainer"
            )

    @property
    def folder(self) -> AnyPath:
        """Ray's storage path of this run.

        Raises:
            ConfigurationError: it is in a store that fsspec does not reach, or not with these credentials.
        """
        if self._found is None:
            self._found = self._find()
        return self._found

    def work_dir(self) -> Path:
        """Return the work dir of a run that is given none: Ray's storage path, or a folder on this machine if that is a store.

        The folder on this machine is the same one when Ray starts the worker here again.
        """
        if isinstance(folder := self.folder, Path):
            return folder
        place = hashlib.sha256(str(folder.parent).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / "trainbus-ray" / place / folder.name

    def at(self, path: str) -> AnyPath:
        """Return the path of a file that an event names."""
        beneath = f"{self.folder}/"
        return self.folder / path.removeprefix(beneath) if path.startswith(beneath) else as_path(path)

    def _find(self) -> AnyPath:
        kind = self._files.type_name
        if kind == "local":
            return Path(self._folder)
        if (inner := privates.inside(self._files)) is not None:
            protocol = inner.protocol if isinstance(inner.protocol, str) else inner.protocol[0]
            return Path(self._folder) if protocol == "file" else RemotePath(f"{protocol}://{self._folder}", inner)
        if kind not in _PROTOCOLS:
            raise ConfigurationError(
                f"Ray's storage path {self._folder} is in a file system of the kind {kind!r}, which trainbus cannot reach by "
                "itself: give RunConfig storage_filesystem=PyFileSystem(FSSpecHandler(fs)) with a file system of fsspec"
            )
        found = RemotePath(f"{_PROTOCOLS[kind]}://{self._folder}")
        try:
            reached, error = found.exists(), None  # Ray has written a file there
        except CheckpointError as problem:
            reached, error = False, problem
        if not reached:
            raise ConfigurationError(
                f"Ray's storage path is {found}, but trainbus does not find it there ({error or 'it is empty'}): set its "
                "address and credentials in the environment of the workers (for S3: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...), "
                "or give RunConfig storage_filesystem=PyFileSystem(FSSpecHandler(fs))"
            ) from error
        return found

    @property
    def keeps(self) -> int | None:
        """Ray's ``num_to_keep``; None if it keeps all checkpoints."""
        return privates.kept_by_ray()

    def report(self, metrics: Mapping[str, Any], folder: str) -> None:
        """Tell Ray metrics and, if it is not empty, the name of a folder in its storage path as a checkpoint.

        Blocks until Ray's controller has taken the report before, usually for at most 2 s.
        """
        checkpoint = self._train.Checkpoint(f"{self._folder}/{folder}", self._files) if folder else None
        self._train.report(
            ranked(metrics, *privates.score_of_ray()) if folder else dict(metrics),
            checkpoint=checkpoint,
            checkpoint_upload_mode=self._train.CheckpointUploadMode.NO_UPLOAD,
        )

    def notice(self) -> Any:
        """Return Ray's ``PreemptionInfo`` if it is about to take machines of this run away; else None."""
        return self._train.get_preemption_info()

    def reported(self, seconds: float) -> dict[str, int]:
        """Return the names of the folders of the checkpoints that Ray knows, with their iterations (-1 if it was not told).

        It is not a collective, and takes at most ``seconds``.
        """
        known = self._train.get_all_reported_checkpoints(
            consistency_mode=self._train.CheckpointConsistencyMode.COMMITTED, timeout_s=seconds
        )
        return {Path(one.checkpoint.path).name: int((one.metrics or {}).get("iter", -1)) for one in known}


def ranked(metrics: Mapping[str, Any], score: str | None, greater_is_better: bool) -> dict[str, Any]:
    """Return the metrics of a checkpoint with the worst score that is finite, if it has none, NaN or an infinite one.

    Without the score, Ray takes a checkpoint for the best one if a smaller score is better. It stores NaN as null, and fails by
    it once it has started again (CheckpointManager._get_checkpoint_score, seen in 2.60.0).
    """
    if score is None or math.isfinite(metrics.get(score, math.nan)):
        return dict(metrics)
    return {**metrics, score: -sys.float_info.max if greater_is_better else sys.float_info.max}
