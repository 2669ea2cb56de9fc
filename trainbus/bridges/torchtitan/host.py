"""The bus in a torchtitan ``Trainer``: ``attach(bus, trainer)`` before ``trainer.train()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, update_wrapper, wraps
from pathlib import Path
from typing import Any, ClassVar

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX

from trainbus.bridges.bridge import Bridge
from trainbus.bridges.copies import replaced
from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.torchtitan import privates
from trainbus.bridges.torchtitan.checkpoints import TitanCheckpoints, TitanSaver
from trainbus.bridges.torchtitan.rates import Rates
from trainbus.bridges.torchtitan.state import SplitEntry
from trainbus.eventloop import events as ev
from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError, TrainingError
from trainbus.eventloop.training import HostedRun
from trainbus.eventloop.training.arguments import Limit
from trainbus.eventloop.training.machine import EPOCH, ITERATION, TRAIN, VAL_ITERATION, Counters
from trainbus.eventloop.user_errors import add_note, contextmanager, text_of

Method = Callable[..., Any]

_PASSES = "torchtitan runs both passes in one function, which a CUDA graph may replay; bus.watch() sees modules without graphs"
_NO_TEST = "a torchtitan Trainer has no tests; its validator's runs are validations"


class TorchtitanBridge(Bridge):
    """A bus in a torchtitan ``Trainer``.

        trainer = config.build()
        attach(bus, trainer, epoch_steps=1000)
        trainer.train()

    - An iteration is one forward and backward pass; a step has ``gradient_accumulation_steps`` of them. ``event.batch`` is
      what the loader gave: inputs by name, and labels. The batches of a step are fetched before its first iteration.
    - ``outputs["loss"]`` is a detached tensor, scaled so that its mean over the iterations of a step and over all ranks is the
      loss that torchtitan logs. In steps that torchtitan logs, ``grad_norm``, ``global_avg_loss``, ``global_max_loss`` and
      ``n_tokens_seen`` are outputs, too.
    - The state of the bus is in all checkpoints of torchtitan that it can resume from. Requested checkpoints have the names
      given by hooks, in ``dump_folder``. A resume takes the newest one of both.

    Args:
        bus: the bus.
        trainer: the trainer.
        epoch_steps: steps of an epoch, for hooks that count epochs. torchtitan has none: by default a training is one epoch.

    Raises:
        ConfigurationError: pipeline parallelism, losses that are DTensors, or a checkpointer that is no ``CheckpointManager``.
    """

    host, trains = "a torchtitan Trainer", "train"
    instead: ClassVar[Mapping[str, str]] = {"work_dir": "files of hooks go to dump_folder"}
    missing: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("before_forward", "after_forward", "before_backward", "after_backward"), _PASSES),
        **dict.fromkeys(("before_test", "before_test_epoch", "before_test_iter"), _NO_TEST),
        **dict.fromkeys(("after_test_iter", "after_test_epoch", "after_test"), _NO_TEST),
    }

    @check_options
    def __init__(self, bus: Bus, trainer: Any, *, epoch_steps: Limit | None = None) -> None:
        privates.check(trainer)
        super().__init__(bus, trainer)
        dims, manager = trainer.parallel_dims, trainer.checkpointer
        if dims.pp_enabled:
            raise ConfigurationError(
                f"pipeline_parallel_degree={dims.pp}: ranks of other stages have no loss, and the bus was not tried with them; "
                "use other kinds of parallelism, or train without a bus"
            )
        if dims.spmd_backend == "full_dtensor":
            raise ConfigurationError(
                "spmd_backend='full_dtensor': its losses are DTensors, which no rank can read alone; use 'spmd_types' or "
                "'partial_dtensor', or train without a bus"
            )
        if manager.enable and not isinstance(manager, CheckpointManager):
            raise ConfigurationError(
                f"the checkpointer is a {type(manager).__name__}; the state of the bus goes into those of "
                "torchtitan.components.checkpoint.CheckpointManager: name that in the configuration, or checkpoint.enable=False"
            )
        self._epoch_steps = epoch_steps
        self._window: int = trainer.gradient_accumulation_steps
        self._host: TrainerHost
        self._training: HostedRun | None = None  # the run, while the trainer trains
        self._last: HostedRun | None = None  # the run before it
        self._loaded = False  # the run has resumed
        self._scale = self._window * dims.dp_replicate * dims.dp_shard * dims.cp
        self._rates = Rates(trainer.lr_schedulers.schedulers)
        self._checkpoints = TitanCheckpoints(manager, self._rates) if manager.enable else None
        self._passes = 0  # of the present step
        self._outputs: dict[str, Any] | None = None  # of an iteration that has not ended
        self._validated: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap methods of the trainer and its parts."""
        trainer = self.trainer
        metrics, manager, validator = trainer.metrics_processor, trainer.checkpointer, getattr(trainer, "validator", None)
        around: list[tuple[Any, str, Method]] = [
            (trainer, "train", self._train),
            (trainer, "should_continue_training", self._should_continue),
            (trainer, "train_step", self._train_step),
            (trainer, "forward_backward_step", self._pass),
            (metrics, "log", self._log),
            (metrics, "log_validation", self._log_validation),
        ]
        if self._checkpoints is not None:
            around += [(manager, name, getattr(self, f"_{name}")) for name in ("load", "dcp_save", "dcp_load")]
        inside = {"validate": self._validate, "post_dataloading_process": self._val_batch, "loss_fn": self._val_loss}
        around += [(validator, name, wrapper) for name, wrapper in inside.items() if hasattr(validator, name)]
        for owner, name, wrapper in around:
            original = getattr(owner, name)
            self.replace(owner, name, update_wrapper(partial(wrapper, original), original))

    # ---------------------------------------------------------------------------------------------------- the training

    def _train(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        with self._closing():
            self._last = self.run
            self._training = run = self._begin_run(self.trainer.optimizers.optimizers)
            result = original(*args, **kwargs)
            self._end_training(run)
        return result

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """End the run that a block has begun, also after an exception."""
        self._outputs, self._loaded = None, False
        try:
            yield
        except BaseException as error:
            if self.running is not None:
                self._wait_for_files(error)
                self._host.drive.fail(error)
            raise
        finally:
            self._training = None
        if self.running is not None:
            self._host.drive.end_run()

    def _begin_run(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> HostedRun:
        trainer, config = self.trainer, self.trainer.config
        host = TrainerHost(resume_way="the same command")
        host.convert = SplitEntry
        several = {str(place): one for place, one in enumerate(optimizers)}
        models, folder = trainer.model_parts, Path(config.dump_folder)
        optimizer = optimizers[0] if len(optimizers) == 1 else several
        run = HostedRun(self.bus, model=models[0], optimizer=optimizer, work_dir=folder, host=host)
        host.saver = TitanSaver(host, trainer.checkpointer)
        if not optimizers:
            host.continue_from(self.run)
        run.foreign.schedulers = trainer.lr_schedulers.schedulers if optimizers else ()
        half = {"precision": "bf16"} if config.training.mixed_precision_param == "bfloat16" else {}
        schedule = {"schedule": config.lr_scheduler.decay_type, "schedule.warmup_steps": config.lr_scheduler.warmup_steps}
        run.foreign.settings = half | schedule | {"batch_size": config.training.local_batch_size}
        run.validates = bool(config.validator.enable)
        host.train_data, host.accumulation = trainer.dataloader, self._window
        host.epoch_length = self._epoch_steps and self._epoch_steps * self._window
        host.around_rates = self._rates.around
        self.run, self._host = run, host
        host.drive.begin_run()
        return run

    def _load(self, original: Method, step: int = -1) -> Any:
        """Load a checkpoint with the state of the bus, which belongs between the beginning of the run and of its training."""
        if self._training is None or self._checkpoints is None:
            return original(step)
        found, loaded = self._checkpoints.load(self._host, original, step)
        if loaded is not None:
            path, entry = loaded
            if entry is None:
                self._host.resume_without_entry(self._counters(), path)
            else:
                self._host.restore_entry(entry, path)
            self._loaded = True
        return found

    def _counters(self) -> Counters:
        """Return the counts of a run at the trainer's step."""
        step, window = self.trainer.step, self._window
        epoch, rest = divmod(step, self._epoch_steps) if self._epoch_steps else (0, step)
        return Counters(epoch=epoch, iter=step * window, update=step, batches=rest * window)

    def _begin_training(self, run: HostedRun) -> None:
        """Begin the training, before its first step."""
        trainer, host, counters = self.trainer, self._host, self._counters()
        if trainer.step and not self._loaded:
            if self._last is not None and self._last.counters.update == trainer.step:  # this trainer goes on
                host.continue_from(self._last)
            else:
                host.resume_without_entry(counters)
        run.counters.go_to(epoch=counters.epoch, batches=counters.batches)
        steps = [host.around_step(one) for one in run.optimizers.values()]
        step = trainer.optimizers.step

        @wraps(step)
        def publish_steps(*args: Any, **kwargs: Any) -> Any:
            for before, _ in steps:
                before()
            result = step(*args, **kwargs)
            for _, after in steps:
                after()
            return result

        # Not by torch's step hooks: before it loads, torchtitan steps each optimizer to make its state.
        run.defer(replaced(trainer.optimizers, "step", publish_steps))
        length, total = self._epoch_steps, trainer.config.training.steps
        whole = bool(length) and total % length == 0
        host.drive.begin_train(**{"max_epochs": total // length} if whole else {"max_iters": total * self._window})

    def _should_continue(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Save and stop before the next step, after torchtitan has logged, saved and validated."""
        run = self._training
        if run is None:
            return original(*args, **kwargs)
        drive = self._host.drive
        if TRAIN not in run.state.machine:
            self._begin_training(run)
        drive.drop_evaluation()
        self._save_due()
        return original(*args, **kwargs) and not drive.should_stop()

    def _save_due(self) -> None:
        if self._checkpoints is not None:
            self._host.saver.write_due(partial(self._checkpoints.write, self._host))

    def _train_step(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Run one step: some iterations, of which the last one ends behind the step and what is logged of it."""
        run = self._training
        if run is None:
            return original(*args, **kwargs)
        drive, trainer = self._host.drive, self.trainer
        self._passes = 0
        result = original(*args, **kwargs)
        if ITERATION not in run.state.machine:
            raise TrainingError(
                f"{type(trainer).__name__}.train_step() has not called forward_backward_step() once for each of its "
                f"{self._window} accumulation steps, as torchtitan's does, so the bus cannot tell its iterations"
            )
        self._end_iteration()
        if run.counters.batches == self._host.epoch_length or trainer.step >= trainer.config.training.steps:
            drive.end_epoch()
        return result

    def _pass(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Run one forward and backward pass: one iteration."""
        run = self._training
        if run is None:
            return original(*args, **kwargs)
        drive, counters, length = self._host.drive, run.counters, self._host.epoch_length
        if EPOCH not in run.state.machine:
            drive.begin_epoch()
        self._passes += 1
        batch = (kwargs.get("input_dict"), kwargs.get("labels"))
        drive.begin_iteration(batch, last=None if length is None else counters.batches + 1 == length)
        loss = original(*args, **kwargs)
        # Of a CUDA graph, the next pass would overwrite it.
        self._outputs = {"loss": loss.detach() * self._scale} if run.wants(ev.AfterTrainIter) else None
        if self._passes < self._window:
            self._end_iteration(window_open=True)
        return loss

    def _end_iteration(self, *, window_open: bool = False) -> None:
        outputs, self._outputs = self._outputs, None
        self._host.window_open = window_open
        self._host.drive.end_iteration(outputs)

    def _log(
        self,
        original: Method,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make what torchtitan logs of a step outputs of its last iteration; the rates are those of the optimizers."""
        run = self._training
        if run is not None and ITERATION in run.state.machine:
            numbers = {"grad_norm": grad_norm, "global_avg_loss": global_avg_loss, "global_max_loss": global_max_loss}
            run.report(**numbers, **{name: one for name, one in (extra_metrics or {}).items() if not name.startswith("lr/")})
        return original(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=extra_metrics, **kwargs)

    def _end_training(self, run: HostedRun) -> None:
        """End the training; an epoch that a hook has cut short is left without ``after_train_epoch``."""
        drive, machine = self._host.drive, run.state.machine
        drive.drop_evaluation()
        if EPOCH in machine:
            drive.abandon_epoch() if run.state.agreed.stop else drive.end_epoch()
        if TRAIN in machine:
            drive.end_train()
            self._save_due()
        self._wait_for_files()

    def _wait_for_files(self, error: BaseException | None = None) -> None:
        """Wait until the last save is complete; after ``error``, it is the one to raise."""
        try:
            self.trainer.checkpointer.maybe_wait_for_saving()
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:
                add_note(error, f"and a checkpoint could not be written: {text_of(failure)}")

    # -------------------------------------------------------------------------------------------------- the validations

    def _validate(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        run = self.running
        if run is not None:
            return self._evaluate(original, *args, **kwargs)
        with self._closing():
            self._begin_run()
            return self._evaluate(original, *args, **kwargs)

    def _evaluate(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        drive, steps = self._host.drive, getattr(self.trainer.validator.config, "steps", -1)
        self._host.evaluation_length = steps if steps > 0 else None
        self._validated = {}
        self.trainer.checkpointer.maybe_wait_for_staging()  # hooks may lend averages to the model, which is being copied
        drive.begin_evaluation("val")
        result = original(*args, **kwargs)
        drive.end_evaluation(self._validated)
        return result

    def _val_batch(self, original: Method, input_dict: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin an iteration of a validation, where its batch is prepared."""
        run = self.running
        if run is not None and run.state.machine.evaluates:
            self._end_val_iteration(run)
            self._host.drive.begin_evaluation_iteration((input_dict, labels))
        return original(input_dict, labels, *args, **kwargs)

    def _val_loss(self, original: Method, predictions: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the loss function returns, a sum; keep the mean over this rank's tokens."""
        result, run = original(predictions, labels, *args, **kwargs), self.running
        if run is not None and run.wants(ev.AfterValIter):
            self._outputs = {"loss": result[0].detach() / (labels != IGNORE_INDEX).sum()}
        return result

    def _log_validation(
        self, original: Method, loss: float, step: int, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        run = self.running
        if run is not None and run.state.machine.evaluates:
            self._end_val_iteration(run)
            self._validated = {"loss": loss, **(extra_metrics or {})}
        return original(loss=loss, step=step, extra_metrics=extra_metrics, **kwargs)

    def _end_val_iteration(self, run: HostedRun) -> None:
        """End the open iteration of a validation, if there is one, while the model is in evaluation mode."""
        if run.state.machine.innermost is VAL_ITERATION:
            outputs, self._outputs = self._outputs, None
            self._host.drive.end_evaluation_iteration(outputs)

    # -------------------------------------------------------------------------------------------------- the checkpoints

    def _dcp_save(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        if self._training is None or self._checkpoints is None:
            return original(*args, **kwargs)
        return self._checkpoints.save(self._host, *args, **kwargs)

    def _dcp_load(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        if self._training is None or self._checkpoints is None:
            return original(*args, **kwargs)
        return self._checkpoints.dcp_load(self._host, *args, **kwargs)
