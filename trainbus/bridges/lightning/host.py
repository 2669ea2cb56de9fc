"""The bridge to ``lightning.Trainer``, and to the one of ``pytorch_lightning``, the older name of the same package.

:mod:`trainbus.bridges.lightning.iterations` has the iterations of a training; this module has the rest. The bridge is a
callback. It replaces ``strategy.save_checkpoint``, which gets every checkpoint with its path, also the one of
``ModelCheckpoint(save_weights_only=True)``, for which Lightning calls no callback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Final

import torch

from trainbus.bridges.bridge import Bridge
from trainbus.bridges.copies import Unattached
from trainbus.bridges.foreign_calls import time_lightning
from trainbus.bridges.hosted import TrainerHost, iterations_in
from trainbus.bridges.lightning import privates
from trainbus.bridges.lightning.iterations import Iterations, named
from trainbus.bridges.lightning.saver import plugin_of
from trainbus.eventloop.checkpoint import AnyPath, as_path
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.privates import metadata_of, with_metadata
from trainbus.eventloop.training import Driver, HostedRun, check_needs
from trainbus.eventloop.training.driver import EvaluationStage
from trainbus.eventloop.training.machine import EPOCH, ITERATION, Counters

_AVERAGES: Final = ("WeightAveraging", "StochasticWeightAveraging")  # Lightning's callbacks that average the weights

_TUNER_FILES: Final = (".lr_find_", ".scale_batch_size_")
"""Begins of the names of files from which Lightning's tuner restores the trainer. They are none of the run's checkpoints."""


class _Callback:
    """The common part of the callbacks in a trainer and in its copies: what Lightning looks up or calls in every callback."""

    def __getattr__(self, name: str) -> None:
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Lightning skips methods that are not callable.

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the entry is added when the path is known."""
        return {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Do nothing; Lightning calls it unseen. It calls :meth:`load_state_dict` next to ``on_load_checkpoint``."""

    on_load_checkpoint = on_save_checkpoint


class UnattachedCallback(_Callback, Unattached):
    """Tells once that the copy of a trainer has no bus; else it does nothing."""

    # Not the key of the bridge: Lightning warns if a checkpoint has the state of a callback that the trainer does not have.
    state_key = _legacy_state_key = "trainbus (copied without a bus)"
    teardown = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Tell that the copy has no bus."""
        if stage == "fit":
            self.tell(trainer)


class LightningBridge(_Callback, Bridge):
    """A callback that drives a run in the order of trainbus's own loop, and keeps the state of the bus in checkpoints.

    Lightning validates before its ``on_train_epoch_end``. A validation after the last batch of an epoch comes after
    ``after_train_epoch`` here, as in every other run.
    """

    host: ClassVar[str] = "lightning.Trainer"
    missing: ClassVar[Mapping[str, str]] = {}
    instead: ClassVar[Mapping[str, str]] = {
        "checkpoints": "write Trainer(plugins=[TrainbusCheckpointIO()]), which needs no bus",
        "work_dir": "files of hooks go to trainer.log_dir: write Trainer(default_root_dir=...)",
    }

    state_key = _legacy_state_key = "trainbus"

    # Lightning skips methods that are not callable. Some are set per iteration: see Iterations.
    on_train_batch_start = on_before_zero_grad = None
    on_train_batch_end: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None

    _host: TrainerHost
    _drive: Driver
    _iterations: Iterations
    _entry: Mapping[str, Any] | None = None  # the entry of the checkpoint that Lightning has loaded
    _trained: TrainerHost | None = None  # the host of the last `trainer.fit()`, whose state later checkpoints have, too
    _before: Mapping[str, Any]  # the trainer's metrics before the present validation or test

    def install(self) -> None:
        """Add the callback before all callbacks that save, and wrap the methods."""
        privates.check(self.trainer)
        trainer, strategy = self.trainer, self.trainer.strategy
        if privates.starts_processes(strategy):
            raise ConfigurationError(
                f"the strategy {type(strategy).__name__} starts its processes from this one, where the bus and its threads "
                'would stay behind: use Trainer(strategy="ddp"), which starts your script in each process'
            )
        savers = [index for index, one in enumerate(trainer.callbacks) if _has_base(one, "Checkpoint")]
        trainer.callbacks.insert(min(savers, default=len(trainer.callbacks)), self)
        self.on_detach(self._remove_callback)
        self.replace(strategy, "save_checkpoint", partial(self._save_checkpoint, strategy.save_checkpoint))

    def _remove_callback(self) -> None:
        self.trainer.callbacks[:] = [one for one in self.trainer.callbacks if one is not self]

    def __reduce__(self) -> str | tuple[Any, ...]:
        return UnattachedCallback, (self.host,)  # in a copy of the trainer

    # ------------------------------------------------------------------------------------------------ begin and end

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Begin the run. The sanity check is not published as a validation."""
        self._begin(trainer.optimizers)

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        """Warn of metrics that hooks need and the sanity check has not logged; the module may log them only in training."""
        if trainer.callback_metrics:
            check_needs(self.bus, trainer.callback_metrics, "the sanity check", sure=False)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin the run unless a sanity check has, resume, and begin the training."""
        run = self.running or self._begin(trainer.optimizers)
        host, last = self._host, self._trained
        self._trained = host
        length = trainer.num_training_batches
        host.epoch_length = None if length == float("inf") else length
        host.train_data = trainer.train_dataloader
        host.accumulation = trainer.accumulate_grad_batches if module.automatic_optimization else None
        run.validates = bool(trainer.enable_validation)
        run.foreign.settings = {"precision": str(trainer.precision)}
        run.foreign.schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        run.foreign.averages = [
            type(one).__name__ for one in trainer.callbacks if any(_has_base(one, kind) for kind in _AVERAGES)
        ]
        time_lightning(trainer, run, self)
        self._iterations = Iterations(self, trainer, host, self._begin_epoch, self._save_or_stop)
        self._resume(run)
        if not trainer.ckpt_path and trainer.global_step:  # the trainer goes on after its last fit()
            host.continue_from(None if last is None else last.run)
        self._drive.begin_train(**_limits(trainer, host.epoch_length))
        self._stop_if_asked()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """End the training and the run."""
        run, drive = self.running, self._drive
        if run is None:
            return
        if trainer.should_stop and not run.state.stops:
            run.state.own.reason = "trainer.should_stop was set"
        drive.end_train()
        self._host.saver.write_due(self._write)
        if (plugin := plugin_of(trainer)) is not None:
            plugin.wait()  # its files are reported while the run is open
        drive.end_run()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Report the exception, and end the run."""
        if self.running is not None:
            if (plugin := plugin_of(trainer)) is not None:
                plugin.finish()
            self._drive.fail(exception)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End the run of a validation or a test, or of a training without a batch."""
        if self.running is not None:
            self._drive.end_run()

    def _begin(self, optimizers: list[torch.optim.Optimizer]) -> HostedRun:
        trainer = self.trainer
        given = {f"optimizer{index}" if len(optimizers) > 1 else "optimizer": one for index, one in enumerate(optimizers)}
        folder, name = trainer.log_dir, None
        if remote := "://" in str(folder) and not str(folder).startswith("file://"):
            name = str(folder).rstrip("/").rpartition("/")[2]
        work_dir = None if remote else folder
        last, host = self.run, TrainerHost(".ckpt", resume_way='trainer.fit(..., ckpt_path="{}")')
        run = HostedRun(self.bus, model=trainer.lightning_module, optimizer=given, work_dir=work_dir, name=name, host=host)
        reason = f" (trainer.log_dir is the URL {folder})" if remote else ""
        run.work_dir_advice = f"give the first logger, or Trainer(default_root_dir=), a local directory{reason}"
        run.config = dict(trainer.lightning_module.hparams)
        if not optimizers:
            host.continue_from(last)
        self.run, self._host, self._drive = run, host, host.drive
        self._drive.begin_run()
        return run

    def _resume(self, run: HostedRun) -> None:
        """Continue from the checkpoint that Lightning has loaded, if any."""
        trainer, entry, self._entry = self.trainer, self._entry, None
        if not trainer.ckpt_path:
            return
        path = str(as_path(trainer.ckpt_path).absolute())
        trains = trainer.state.fn == "fit"
        if entry is not None:
            if not trains:  # afterwards the model has the weights of the file again, such as the averaged ones
                state = run.model.state_dict()
                loaded = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
                run.defer(partial(run.model.load_state_dict, with_metadata(loaded, metadata_of(state))))
            self._host.restore_entry(entry, path)
        else:
            batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            counters = Counters(epoch=trainer.current_epoch, iter=batches, update=trainer.global_step)
            self._host.resume_without_entry(counters if trains else Counters(), path)

    # ------------------------------------------------------------------------------------------------------ training

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Begin an epoch. Lightning does not call this for an epoch in whose middle it resumes."""
        self._begin_epoch(0)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """End the epoch, unless a validation at its end has done so."""
        machine = self._drive.state.machine
        if self._iterations.step_fetches:
            self._drive.drop_iteration()
        if ITERATION in machine:  # the module's on_train_batch_start returned -1
            self._drive.abandon_iteration()
        if EPOCH in machine:
            if trainer.should_stop and not self._iterations.last:
                self._drive.abandon_epoch()
            else:
                self._drive.end_epoch()
        self._host.saver.write_due(self._write)
        self._stop_if_asked()

    def _begin_epoch(self, batches: int) -> None:
        self._drive.state.counters.go_to(epoch=self.trainer.current_epoch, batches=batches)
        self._iterations.length, self._iterations.last = self.trainer.num_training_batches, False
        self._drive.begin_epoch()

    def _save_or_stop(self) -> None:
        """Save and stop after an iteration, if a hook has asked for it."""
        self._host.saver.write_due(self._write)
        if self._drive.state.stops:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._drive.should_stop():
            self.trainer.should_stop = True

    # --------------------------------------------------------------------------------------------- validation and test

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Begin a validation; first end an epoch that has no batch left."""
        if trainer.sanity_checking:
            return
        if self.running is None:
            self._resume(self._begin([]))
        elif EPOCH in self._drive.state.machine and self._iterations.last:
            self._drive.end_epoch()
        self._begin_evaluation("val", trainer.num_val_batches)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Begin a test, in a run of its own."""
        self._resume(self._begin([]))
        self._begin_evaluation("test", trainer.num_test_batches)

    def _begin_evaluation(self, stage: EvaluationStage, lengths: list[int | float]) -> None:
        length = sum(lengths)
        self._host.evaluation_length = None if length == float("inf") else int(length)
        self._before = dict(self.trainer.callback_metrics)
        self._drive.begin_evaluation(stage)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *index: int) -> None:
        """Begin an iteration of a validation or test."""
        if not trainer.sanity_checking:
            self._drive.begin_evaluation_iteration(batch)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        """End an iteration of a validation or test."""
        if not trainer.sanity_checking:
            self._drive.end_evaluation_iteration(named(outputs))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """End a validation or test with the metrics that the module has logged in it."""
        if trainer.sanity_checking:
            return
        self._drive.drop_iteration()
        self._drive.end_evaluation(self._metrics())
        run = self.run
        if run is not None and EPOCH in self._drive.state.machine:  # else the epoch's end follows, where Lightning saves
            self._host.saver.write_due(self._write)
        if run is not None and run.training:
            self._stop_if_asked()

    on_test_batch_start, on_test_batch_end, on_test_end = on_validation_batch_start, on_validation_batch_end, on_validation_end

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics of the current validation or test: the entries that were replaced since its begin."""
        found = self.trainer.callback_metrics
        return {name: value.item() for name, value in found.items() if value is not self._before.get(name)}

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the entry of a checkpoint until the run has begun."""
        self._entry = state

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Forget an entry that was loaded before."""
        self._entry = None

    def _write(self, path: AnyPath) -> None:
        self.trainer.save_checkpoint(str(path), weights_only=False)  # the default, too, but Lightning prints a note about it

    def _save_checkpoint(
        self, original: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, *arguments: Any, **options: Any
    ) -> None:
        host = self._trained
        if host is None or self not in self.trainer.callbacks or as_path(filepath).name.startswith(_TUNER_FILES):
            original(checkpoint, filepath, *arguments, **options)
            return
        plugin, writing = plugin_of(self.trainer), host.saver.writing(as_path(filepath))
        if plugin is None:
            with writing:
                self._add_entry(host, checkpoint, filepath)
                original(checkpoint, filepath, *arguments, **options)
            return
        plugin.around, plugin.raises = writing, host.saver.raises
        try:
            with writing.copying():
                self._add_entry(host, checkpoint, filepath)
                original(checkpoint, filepath, *arguments, **options)
        except Exception:
            with writing:
                raise
        finally:
            left, plugin.around, plugin.raises = plugin.around, None, True
        if left is not None:  # on another rank, or with a strategy that writes by itself
            with left:
                pass

    def _add_entry(self, host: TrainerHost, checkpoint: dict[str, Any], filepath: Any) -> None:
        entry, weights = host.gather_entry(str(filepath), checkpoint["state_dict"])
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = with_metadata({**state, **weights.get("model", {})}, metadata_of(state))
        if "callbacks" in checkpoint:  # not in one with the weights only
            checkpoint["callbacks"][self.state_key] = entry


def _has_base(value: object, name: str) -> bool:
    """Return True if a class of Lightning is a base of the object's class; no package is imported to compare with it."""
    return any(base.__name__ == name and "lightning" in base.__module__ for base in type(value).__mro__)


def _limits(trainer: Any, length: int | None) -> dict[str, int]:
    """Return the limit that ends the training, in epochs or iterations; nothing if there is none."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
    steps = trainer.max_steps if trainer.max_steps > 0 and trainer.lightning_module.automatic_optimization else None
    iters = None if steps is None else iterations_in(steps, trainer.accumulate_grad_batches, length)
    if iters is not None and (epochs is None or length is None or iters < epochs * length):
        return {"max_iters": iters}
    return {} if epochs is None else {"max_epochs": epochs}
