"""``GuestRunner``: a run, with the attributes of MMEngine's ``Runner`` that its hooks use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from mmengine.runner import Runner

from trainbus.compat.mmengine import parts
from trainbus.compat.mmengine.loops import EpochLoop, EvaluationLoop, IterLoop
from trainbus.eventloop import TrainingError
from trainbus.eventloop.checkpoint import unwrapped

_UNKNOWN_DATA: Final = "the training data is unknown before the first epoch"
_REASONS: Final[Mapping[str, str]] = {
    "model": "the run has several models, but MMEngine's runner has one",
    "optim_wrapper": "the run has no optimizer",
    "max_epochs": "the run has no limit yet: it gets one from run.epochs()",
    "max_iters": f"{_UNKNOWN_DATA}, or its data has no length",
    "train_dataloader": _UNKNOWN_DATA,
    "val_dataloader": "the run has not validated yet",
    "test_dataloader": "the run has not tested yet",
}


class MissingAttributeError(AttributeError):
    """A guest uses an attribute of MMEngine's runner that a run lacks; ``hasattr`` is then False."""


class GuestRunner:
    """A run with the interface of MMEngine's ``Runner``. The guests of one bus share it, from run to run.

    It has the attributes that MMEngine's own hooks use: model, optimizers, schedulers, loops, data, counts, directories,
    message hub, logger, visualizer and log processor. Of the run's ``config=``, it uses ``param_scheduler``,
    ``log_processor``, ``visualizer`` and ``log_level`` as MMEngine does. Hooks may add further attributes.

    ``before_run`` and ``before_train`` come when the run knows its data, which in your own loop is the first epoch.
    """

    def __init__(self) -> None:
        self.run: Any = None
        self.trains = False  # True if the guests' `before_train` was called in the current run
        self.stops = False  # True if a guest has stopped the training
        self.param_schedulers: Any = None
        self._adapters: list[Any] = []
        self._calling: list[Any] = []
        self._entry: Mapping[str, Any] | None = None
        self._wrapper: tuple[list[int], Any] | None = None

    call_hook = Runner.call_hook

    hooks = _hooks = property(lambda self: [adapter.guest for adapter in self._adapters])
    model_name = property(lambda self: type(unwrapped(self.run.model)).__name__)
    by_iter = property(lambda self: self.run.counters.max_iters is not None)
    iter = property(attrgetter("run.counters.iter"))
    train_loop = property(lambda self: self._loops[self.by_iter])
    val_loop = property(lambda self: None if self.run.validates is False else self._loops[2])
    test_loop = property(lambda self: self._loops[3])
    _train_loop = property(lambda self: self.train_loop if self.run.training or self.trains else None)
    train_dataloader = property(attrgetter("train_loop.dataloader"))
    val_dataloader = property(lambda self: self._loops[2].dataloader)
    test_dataloader = property(lambda self: self._loops[3].dataloader)
    seed, rank, world_size = (property(attrgetter(f"run.{name}")) for name in ("seed", "rank", "world_size"))
    distributed = property(lambda self: self.world_size > 1)
    _resume = property(lambda self: self._entry is not None)

    @property
    def model(self) -> torch.nn.Module:
        if len(self.run.models) > 1:
            self.absent("model")
        model: torch.nn.Module = self.run.model
        return model

    @property
    def optim_wrapper(self) -> Any:
        if not self.run.optimizers:
            self.absent("optim_wrapper")
        if self._wrapper is None:
            self._wrapper = ([id(one) for one in self.run.optimizers.values()], parts.optim_wrapper(self.run.optimizers))
        return self._wrapper[1]

    @property
    def epoch(self) -> int:
        """Epochs done; 0 in iteration-based training."""
        return 0 if self.by_iter else self.run.counters.epoch

    @property
    def max_epochs(self) -> int:
        """Total epochs; 1 in iteration-based training."""
        limit = 1 if self.by_iter else self.run.counters.max_epochs
        return self.absent("max_epochs") if limit is None else int(limit)

    @property
    def max_iters(self) -> int:
        limit = self.run.data.total_iters
        return self.absent("max_iters") if limit is None else int(limit)

    @cached_property
    def _loops(self) -> tuple[Any, Any, Any, Any]:
        return EpochLoop(self), IterLoop(self), EvaluationLoop(self, "val_loop"), EvaluationLoop(self, "test_loop")

    @property
    def work_dir(self) -> str:
        directory = self.run.work_dir
        return self.absent("work_dir") if directory is None else str(Path(directory).absolute())

    @property
    def log_dir(self) -> str:
        """The directory of logs, named by the time of the first run."""
        return str(Path(self.work_dir, self.timestamp))

    _log_dir = log_dir

    @cached_property
    def cfg(self) -> Any:
        return parts.config(self.run.config)

    @cached_property
    def logger(self) -> Any:
        level = self.run.config.get("log_level", "INFO")
        return parts.logger(self.experiment_name, self.log_dir, f"{self.timestamp}.log", level)

    @cached_property
    def visualizer(self) -> Any:
        """MMEngine's visualizer; by default it writes into the log dir."""
        made = parts.visualizer(self.run.config.get("visualizer"), self.experiment_name, self.log_dir)
        metainfo = getattr(getattr(self.run.data.train, "dataset", None), "metainfo", None)
        if metainfo is not None:
            made.dataset_meta = metainfo
        if self.run.config:
            made.add_config(self.cfg)
        return made

    @cached_property
    def log_processor(self) -> Any:
        return parts.log_processor(self.run.config.get("log_processor"), by_epoch=not self.by_iter)

    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: Mapping[str, Any] | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: dict[str, Any] | None = None,
        by_epoch: bool = True,
        backend_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint of MMEngine, which its runner can resume. A local file is written atomically and durably."""
        if file_client_args is None and backend_args is None:
            backend_args = parts.backend_for(out_dir)
        Runner.save_checkpoint(
            self, out_dir, filename, file_client_args, save_optimizer, save_param_scheduler, meta, by_epoch, backend_args
        )

    def absent(self, name: str) -> NoReturn:
        """Raise the error for a missing attribute."""
        if name in ("work_dir", "log_dir", "logger", "visualizer"):
            reason = self.run.work_dir_advice
        else:
            reason = _REASONS.get(name, "a trainbus run does not have this attribute")
        raise MissingAttributeError(f"{self._caller} uses runner.{name}: {reason}", name=name, obj=self)

    def refuse(self, action: str, reason: str) -> NoReturn:
        """Raise the error for an action without an effect on the run."""
        raise TrainingError(f"{self._caller} uses runner.{action}: {reason}")

    @property
    def _caller(self) -> str:
        return f"MMEngine's hook {type(self._calling[-1]).__name__}" if self._calling else "a hook of MMEngine"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.absent(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            self.refuse(f"{name} = ...", "the run decides this itself")
        super().__setattr__(name, value)
