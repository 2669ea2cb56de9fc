"""The bridge to ``lightning.Trainer``: one callback, and three methods of the trainer's strategy that it wraps.

What the callbacks of Lightning 2.6 do not tell, or at a higher price, comes from these methods:

- ``strategy.on_train_batch_start`` begins an iteration. Each call of a callback costs two microseconds more.
- ``strategy.training_step`` returns the outputs before the loss is divided by ``accumulate_grad_batches``, and is the forward
  pass. It runs inside ``optimizer.step(closure)``, so torch's step hook comes before it: see :meth:`_before_step`.
- ``strategy.save_checkpoint`` gets every checkpoint with its path, also of ``ModelCheckpoint(save_weights_only=True)``, for
  which Lightning asks no callback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

from eventloop import events as ev
from eventloop.bridges.bridge import Bridge
from eventloop.bridges.hosted import HostedDriver, HostedRun
from eventloop.checkpoint import AnyPath, as_path
from eventloop.errors import ConfigurationError
from eventloop.training.optimizers import stepping
from eventloop.training.state import Counters

Hook = Callable[..., None] | None


class LightningBridge(Bridge, Callback):  # type: ignore[misc]  # types of Lightning are not looked at
    """A callback that drives a run in the order of trainbus's own loop, and keeps the state of the bus in checkpoints.

    Lightning validates before its ``on_train_epoch_end``. A validation after the last batch of an epoch comes after
    ``after_train_epoch`` here, as in every other run.
    """

    host: ClassVar[str] = "lightning.Trainer"
    missing: ClassVar[Mapping[str, str]] = {}

    state_key = "trainbus"

    # Lightning skips what is not callable, for less than it takes to call an empty method.
    on_train_batch_start = None
    on_before_zero_grad = None

    _drive: HostedDriver
    _heard: Callable[[type[ev.Event], bool], object] = staticmethod(lambda event, default: None)
    _waits: Callable[..., None] | None = None
    """What to call before the step of an optimizer whose ``step(closure)`` has begun: forward and backward come next."""
    _batch: Any = None
    _length: float = 0
    _last = False
    """True if the current batch is the last one of its epoch."""
    _entry: Mapping[str, Any] | None = None
    """The entry of the checkpoint that Lightning has loaded."""
    _trained: HostedRun | None = None
    """The run of the last ``trainer.fit()``, whose state later checkpoints have, too."""
    _before: Mapping[str, Any]
    """The trainer's metrics before the present validation or test."""

    def install(self) -> None:
        """Add the callback before those that save, and wrap the methods."""
        trainer, strategy = self.trainer, self.trainer.strategy
        if isinstance(strategy.launcher, _MultiProcessingLauncher):
            raise ConfigurationError(
                f"the strategy {type(strategy).__name__} starts its processes from this one, where the bus and its threads "
                'would stay behind: use Trainer(strategy="ddp"), which starts your script in each process'
            )
        savers = [index for index, one in enumerate(trainer.callbacks) if isinstance(one, Checkpoint)]
        trainer.callbacks.insert(min(savers, default=len(trainer.callbacks)), self)
        self.on_detach(self._remove_callback)
        self.replace(strategy, "on_train_batch_start", partial(self._begin_iteration, strategy.on_train_batch_start))
        self.replace(strategy, "training_step", self._around_training_step(strategy.training_step))
        self.replace(strategy, "save_checkpoint", partial(self._save_checkpoint, strategy.save_checkpoint))

    def _remove_callback(self) -> None:
        self.trainer.callbacks[:] = [one for one in self.trainer.callbacks if one is not self]

    # ------------------------------------------------------------------------------------------------ begin and end

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Begin the run. The sanity check is not told as a validation."""
        self._begin(trainer.optimizers)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin the run unless a sanity check has, resume, and begin the training."""
        run = self.running or self._begin(trainer.optimizers)
        self._trained = run
        length = trainer.num_training_batches
        run.epoch_length = None if length == float("inf") else length
        run.train_data = trainer.train_dataloader
        run.validates = bool(trainer.enable_validation)
        run.foreign_schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        self._resume(run)
        self._drive.begin_train(**_limits(trainer, run.epoch_length))
        self._stop_if_asked()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """End the training and the run."""
        run, drive = self.running, self._drive
        if run is None:
            return
        if trainer.should_stop and not run.state.stops:
            run.state.stop_reason = "trainer.should_stop was set"
        drive.end_train()
        run.write_due(self._write)
        drive.end_run()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Report the exception, and end the run."""
        if self.running is not None:
            self._drive.fail(exception)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End a validation's or test's run, or that of a training without a batch."""
        if self.running is not None:
            self._drive.end_run()

    def _begin(self, optimizers: list[torch.optim.Optimizer]) -> HostedRun:
        trainer = self.trainer
        named = {"optimizer": optimizers[0]} if len(optimizers) == 1 else _numbered(optimizers)
        run = HostedRun(self.bus, model=trainer.lightning_module, optimizer=named, work_dir=trainer.log_dir, suffix=".ckpt")
        run.config = dict(trainer.lightning_module.hparams)
        self.run, self._drive, self._heard, self._waits = run, run.drive(), run.heard, None
        self._drive.begin_run()
        for optimizer in optimizers:
            inner, (before_step, after_step) = stepping(optimizer), self._drive.around_step(optimizer)
            run.defer(inner.register_step_pre_hook(partial(self._before_step, before_step)).remove)
            run.defer(inner.register_step_post_hook(after_step).remove)
        return run

    def _resume(self, run: HostedRun) -> None:
        """Continue from the checkpoint that Lightning has loaded, if any."""
        trainer, entry, self._entry = self.trainer, self._entry, None
        if not trainer.ckpt_path:
            return
        path = str(as_path(trainer.ckpt_path).absolute()) if "://" not in str(trainer.ckpt_path) else str(trainer.ckpt_path)
        trains = trainer.state.fn == TrainerFn.FITTING
        if entry is not None:
            if not trains:  # afterwards the model has the weights of the file again, such as the averaged ones
                loaded = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
                run.defer(partial(run.model.load_state_dict, loaded))
            run.restore_entry(entry, path)
        else:
            batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            counters = Counters(epoch=trainer.current_epoch, iter=batches, update=trainer.global_step)
            run.resume_without_entry(counters if trains else Counters(), path)

    # ------------------------------------------------------------------------------------------------------ training

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Begin an epoch. Lightning does not call this for an epoch in whose middle it resumes."""
        self._begin_epoch(0)

    def _begin_iteration(self, original: Callable[..., None], batch: Any, batch_idx: int) -> None:
        original(batch, batch_idx)
        if self.running is None:  # in a Tuner
            return
        drive, trainer = self._drive, self.trainer
        if drive.state.scopes.innermost != "epoch":
            self._begin_epoch(batch_idx)
        self._batch = batch
        self._last = batch_idx + 1 >= self._length or trainer.is_last_batch
        drive.begin_iteration(batch, last=self._last)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End an iteration."""
        drive, accumulate = self._drive, trainer.accumulate_grad_batches
        drive.state.in_window = accumulate > 1 and not self._last and (batch_idx + 1) % accumulate != 0
        drive.end_iteration()
        self._batch = None
        run = self.run
        if run is not None and run.save_due:
            run.write_due(self._write)
        if drive.state.stops:
            self._stop_if_asked()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """End the epoch, unless a validation at its end has done so."""
        scopes, run = self._drive.state.scopes, self.run
        if "iter" in scopes:  # the module's on_train_batch_start returned -1
            self._drive.abandon_iteration()
        if "epoch" in scopes:
            if trainer.should_stop and not self._last:
                self._drive.abandon_epoch()
            else:
                self._drive.end_epoch()
        if run is not None:
            run.write_due(self._write)
        self._stop_if_asked()

    def _begin_epoch(self, batches: int) -> None:
        counters = self._drive.state.counters
        counters.epoch, counters.batches = self.trainer.current_epoch, batches
        self._length, self._last, self._waits = self.trainer.num_training_batches, False, None
        self._drive.begin_epoch()

    def _around_training_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(*arguments: Any, **options: Any) -> Any:
            run = self.run
            if run is None or run.state.scopes.innermost != "iter":  # in a Tuner
                return original(*arguments, **options)
            if run.heard(ev.BeforeForward, True):
                run.publish(ev.BeforeForward, batch=self._batch)
            output = original(*arguments, **options)
            outputs = run.state.outputs
            if type(output) is torch.Tensor:
                outputs["loss"] = output
            else:
                outputs.update(_outputs(output))
            if run.heard(ev.AfterForward, True):
                run.publish(ev.AfterForward, outputs=outputs)
            return output

        return training_step

    @property
    def on_before_backward(self) -> Hook:
        """The handler, if the event has subscribers; else Lightning skips it."""
        return self._before_backward if self._heard(ev.BeforeBackward, True) else None

    def _before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self._drive._run.publish(ev.BeforeBackward, loss=loss)

    @property
    def on_after_backward(self) -> Hook:
        """The handler, if the event has subscribers; else Lightning skips it."""
        return self._after_backward if self._heard(ev.AfterBackward, True) else None

    def _after_backward(self, trainer: Any, module: Any) -> None:
        self._drive._run.publish(ev.AfterBackward)

    # A step with a closure first runs the forward and backward passes; then Lightning calls on_before_optimizer_step. A
    # gradient scaler, and a module that steps torch's own optimizer, call step() without a closure, when the gradients are
    # complete.

    def _before_step(self, before_step: Callable[..., None], _: Any, arguments: tuple[Any, ...], options: Any) -> None:
        if not self._heard(ev.BeforeOptimizerStep, True):
            return
        if (arguments[1:2] or (options.get("closure"),))[0] is None:
            before_step()
        else:
            self._waits = before_step

    @property
    def on_before_optimizer_step(self) -> Hook:
        """The handler, if a step waits for its gradients; else Lightning skips it."""
        return None if self._waits is None else self._gradients_complete

    def _gradients_complete(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
        before_step, self._waits = self._waits, None
        if before_step is not None:
            before_step()

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
        elif "epoch" in self._drive.state.scopes and self._last:
            self._drive.end_epoch()
        self._begin_evaluation(trainer.num_val_batches)
        self._drive.begin_validation()

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *index: int) -> None:
        """Begin an iteration of a validation."""
        if not trainer.sanity_checking:
            self._drive.begin_validation_iteration(batch)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        """End an iteration of a validation."""
        if not trainer.sanity_checking:
            self._drive.end_validation_iteration(_outputs(outputs))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """End a validation with the metrics that the module has logged in it."""
        if trainer.sanity_checking:
            return
        self._drive.end_validation(self._metrics())
        run = self.run
        if run is not None and "epoch" in self._drive.state.scopes:  # else the epoch's end follows, where Lightning saves
            run.write_due(self._write)
        if run is not None and run.training:
            self._stop_if_asked()

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Begin a test."""
        self._resume(self._begin([]))
        self._begin_evaluation(trainer.num_test_batches)
        self._drive.begin_test()

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, *index: int) -> None:
        """Begin an iteration of a test."""
        self._drive.begin_test_iteration(batch)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        """End an iteration of a test."""
        self._drive.end_test_iteration(_outputs(outputs))

    def on_test_end(self, trainer: Any, module: Any) -> None:
        """End a test with the metrics that the module has logged in it."""
        self._drive.end_test(self._metrics())

    def _begin_evaluation(self, lengths: list[int | float]) -> None:
        length = sum(lengths)
        if self.run is not None:
            self.run.evaluation_length = None if length == float("inf") else int(length)
        self._before = dict(self.trainer.callback_metrics)

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics of the present validation or test: the others are the same objects as before."""
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
        self.trainer.save_checkpoint(str(path), weights_only=False)  # the default, too, but told on the terminal

    def _save_checkpoint(
        self, original: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, *arguments: Any, **options: Any
    ) -> None:
        run = self._trained
        if run is None:
            original(checkpoint, filepath, *arguments, **options)
            return
        with run.writing(as_path(filepath)):
            entry, weights = run.gather_entry(str(filepath))
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **weights.get("model", {})}
            if "callbacks" in checkpoint:  # not in one with the weights only
                checkpoint["callbacks"][self.state_key] = entry
            original(checkpoint, filepath, *arguments, **options)


def _outputs(output: Any) -> dict[str, Any]:
    """Return what a step has returned as named outputs."""
    if isinstance(output, Mapping):
        return dict(output)
    return {"loss": output} if isinstance(output, torch.Tensor) else {}


def _numbered(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
    return {f"optimizer{index}": optimizer for index, optimizer in enumerate(optimizers)}


def _limits(trainer: Any, length: int | None) -> dict[str, int]:
    """Return the limit that ends the training, in epochs or iterations; nothing if there is none."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
    steps = trainer.max_steps if trainer.max_steps > 0 and trainer.lightning_module.automatic_optimization else None
    iters = None if steps is None else _iterations(steps, trainer.accumulate_grad_batches, length)
    if iters is not None and (epochs is None or length is None or iters < epochs * length):
        return {"max_iters": iters}
    return {} if epochs is None else {"max_epochs": epochs}


def _iterations(steps: int, accumulate: int, length: int | None) -> int:
    """Return the number of batches in this number of steps; the last window of an epoch may be shorter."""
    if length is None:
        return steps * accumulate
    epochs, rest = divmod(steps, -(-length // accumulate))
    return epochs * length + min(rest * accumulate, length)
