"""``GuestRunner``: a run, with the attributes of MMEngine's ``Runner`` that its hooks use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from mmengine.runner import Runner

from eventloop.events import Slot
from hooks.compat.mmengine import parts
from hooks.compat.mmengine.loops import EpochLoop, EvaluationLoop, IterLoop
from hooks.compat.mmengine.moments import Adapter, Moments


class GuestRunner(Moments):
    """A run with the interface of MMEngine's ``Runner``. The guests of one bus share it, from run to run.

    It has the attributes that MMEngine's own hooks use: model, optimizers, schedulers, loops, data, counts, directories,
    message hub, logger, visualizer and log processor. Of the run's ``config=``, it uses ``param_scheduler``,
    ``log_processor``, ``visualizer`` and ``log_level`` as MMEngine does. Hooks may add further attributes.

    ``before_run`` and ``before_train`` come when the run knows its data, which in your own loop is the first epoch.
    """

    call_hook = Runner.call_hook

    @property
    def hooks(self) -> list[Any]:
        """The guests, in the order of priorities."""
        return [adapter.guest for adapter in self._adapters]

    _hooks = hooks

    @property
    def model(self) -> torch.nn.Module:
        """The model, also in its wrapper."""
        if len(self.run.models) > 1:
            self.absent("model")
        model: torch.nn.Module = self.run.model
        return model

    @property
    def model_name(self) -> str:
        """Name of the model's class."""
        return type(self.run.unwrapped_model).__name__

    @property
    def optim_wrapper(self) -> Any:
        """MMEngine's wrapper of the optimizer, or of several by name; the run steps them."""
        if not self.run.optimizers:
            self.absent("optim_wrapper")
        if self._wrapper is None:
            self._wrapper = ([id(one) for one in self.run.optimizers.values()], parts.optim_wrapper(self.run.optimizers))
        return self._wrapper[1]

    @property
    def by_iter(self) -> bool:
        """True in iteration-based training."""
        return self.run.counters.max_iters is not None

    @property
    def epoch(self) -> int:
        """Epochs done; 0 in iteration-based training."""
        return 0 if self.by_iter else self.run.counters.epoch

    @property
    def iter(self) -> int:
        """Iterations done."""
        return int(self.run.counters.iter)

    @property
    def max_epochs(self) -> int:
        """Total epochs; 1 in iteration-based training."""
        limit = 1 if self.by_iter else self.run.counters.max_epochs
        return self.absent("max_epochs") if limit is None else int(limit)

    @property
    def max_iters(self) -> int:
        """Total iterations."""
        limit = self.run.total_iters
        return self.absent("max_iters") if limit is None else int(limit)

    @cached_property
    def _loops(self) -> tuple[Any, Any, Any, Any]:
        return EpochLoop(self), IterLoop(self), EvaluationLoop(self, "val_loop"), EvaluationLoop(self, "test_loop")

    @property
    def train_loop(self) -> Any:
        """The training."""
        return self._loops[self.by_iter]

    @property
    def val_loop(self) -> Any:
        """The validation; None if the run has none."""
        return None if self.run.validates is False else self._loops[2]

    @property
    def test_loop(self) -> Any:
        """The test."""
        return self._loops[3]

    @property
    def _train_loop(self) -> Any:
        return self.train_loop if self.run.training or self.trains else None

    @property
    def train_dataloader(self) -> Any:
        """The training data."""
        return self.train_loop.dataloader

    @property
    def val_dataloader(self) -> Any:
        """The validation data."""
        return self._loops[2].dataloader

    @property
    def test_dataloader(self) -> Any:
        """The test data."""
        return self._loops[3].dataloader

    @property
    def work_dir(self) -> str:
        """The absolute path of the work dir."""
        directory = self.run.work_dir
        return self.absent("work_dir") if directory is None else str(Path(directory).absolute())

    @property
    def log_dir(self) -> str:
        """The directory of logs, named by the time of the first run."""
        return str(Path(self.work_dir, self.timestamp))

    _log_dir = log_dir

    @property
    def seed(self) -> int | None:
        """The seed of the run, if any."""
        seed: int | None = self.run.seed
        return seed

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return int(self.run.rank)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(self.run.world_size)

    @property
    def distributed(self) -> bool:
        """True if there are several processes."""
        return self.world_size > 1

    @property
    def _resume(self) -> bool:
        return self._entry is not None

    @cached_property
    def cfg(self) -> Any:
        """The configuration of the run as MMEngine's ``Config``."""
        return parts.config(self.run.config)

    @cached_property
    def logger(self) -> Any:
        """MMEngine's logger: console, and a file in the log dir."""
        level = self.run.config.get("log_level", "INFO")
        return parts.logger(self.experiment_name, self.log_dir, f"{self.timestamp}.log", level)

    @cached_property
    def visualizer(self) -> Any:
        """MMEngine's visualizer; by default it writes into the log dir."""
        made = parts.visualizer(self.run.config.get("visualizer"), self.experiment_name, self.log_dir)
        metainfo = getattr(getattr(self.run.train_data, "dataset", None), "metainfo", None)
        if metainfo is not None:
            made.dataset_meta = metainfo
        if self.run.config:
            made.add_config(self.cfg)
        return made

    @cached_property
    def log_processor(self) -> Any:
        """MMEngine's log processor."""
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

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.absent(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            self.refuse(f"{name} = ...", "the run decides this itself")
        super().__setattr__(name, value)


_RUNNER: Final = Slot("MMEngine runner", GuestRunner)


def join(run: Any, adapter: Adapter, own: GuestRunner) -> GuestRunner:
    """Add an adapter to the runner of the run. The first adapter keeps the runner of its earlier run."""
    runner: GuestRunner | None = run.shared.get(_RUNNER)
    if runner is None:
        runner = run.shared[_RUNNER] = own
        runner.enter(run)
    runner.add(adapter)
    return runner
