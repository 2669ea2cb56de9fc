"""``RayWorker``: what a worker of Ray Train can ask and tell Ray."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import distributed

from eventloop.bridges.ray import privates
from eventloop.errors import ConfigurationError


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
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"RayTrainHook needs Ray ({error}): pip install 'trainbus[ray]'") from error
        except RuntimeError:  # Ray's check of the caller
            context = None
        if context is None or not hasattr(self._train, "get_preemption_info"):
            raise ConfigurationError(
                "RayTrainHook needs a worker of Ray Train: use the bus in the train_func of a TorchTrainer (Ray 2.60 or later, "
                "without RAY_TRAIN_V2_ENABLED=0), or remove the hook"
            )
        try:
            privates.check(context)
        except NotImplementedError as error:
            advice = "give ScalingConfig a num_workers of at least 1, or remove RayTrainHook"
            raise ConfigurationError(f"Ray's local mode has no storage path: {advice}") from error
        self.rank: int = context.get_world_rank()
        self.size: int = context.get_world_size()
        self._files, self._folder = privates.storage_of(context)
        if self.size > 1 and not distributed.is_initialized():
            raise ConfigurationError(
                f"Ray has {self.size} workers and torch has no process group: each would be a run of its own; use TorchTrainer"
            )

    @property
    def folder(self) -> Path | None:
        """Ray's storage path of this run; None if it is in a store."""
        return Path(self._folder) if self._files.type_name == "local" else None

    def work_dir(self) -> Path:
        """Return Ray's storage path of this run, for a run that is given no work dir.

        Raises:
            ConfigurationError: it is in a store.
        """
        if self.folder is None:
            raise ConfigurationError(
                f"Ray's storage path {self._folder} is in a store ({self._files.type_name}), which cannot be the work dir: "
                'give the run work_dir= and CheckpointHook(out_dir="s3://..."), or Ray a storage_path= that all machines mount'
            )
        return self.folder

    @property
    def keeps(self) -> int | None:
        """Ray's ``num_to_keep``; None if it keeps all checkpoints."""
        return privates.kept_by_ray()

    def report(self, metrics: Mapping[str, Any], folder: Path | None) -> None:
        """Tell Ray metrics and, if it is not None, a folder below its storage path as a checkpoint.

        Blocks until Ray's controller has taken the report before, usually for at most 2 s.
        """
        checkpoint = None if folder is None else self._train.Checkpoint(str(folder), self._files)
        self._train.report(
            dict(metrics) if folder is None else ranked(metrics, *privates.score_of_ray()),
            checkpoint=checkpoint,
            checkpoint_upload_mode=self._train.CheckpointUploadMode.NO_UPLOAD,
        )

    def notice(self) -> Any:
        """Return Ray's ``PreemptionInfo`` if it is about to take machines of this run away; else None."""
        return self._train.get_preemption_info()

    def reported(self, seconds: float) -> Collection[Path]:
        """Return the folders of the checkpoints that Ray knows. It is not a collective, and takes at most ``seconds``."""
        known = self._train.get_all_reported_checkpoints(
            consistency_mode=self._train.CheckpointConsistencyMode.COMMITTED, timeout_s=seconds
        )
        return [Path(one.checkpoint.path) for one in known]


def ranked(metrics: Mapping[str, Any], score: str | None, greater_is_better: bool) -> dict[str, Any]:
    """Return the metrics of a checkpoint with the worst score that is finite, if it has none, NaN or an infinite one.

    Without the score, Ray takes a checkpoint for the best one if a smaller score is better. It stores NaN as null, and fails by
    it once it has started again (CheckpointManager._get_checkpoint_score, seen in 2.60.0).
    """
    if score is None or math.isfinite(metrics.get(score, math.nan)):
        return dict(metrics)
    return {**metrics, score: -sys.float_info.max if greater_is_better else sys.float_info.max}
