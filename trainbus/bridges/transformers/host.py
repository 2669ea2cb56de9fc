"""The bus in a ``transformers.Trainer``: ``attach(bus, trainer)`` before ``trainer.train()``.

Callbacks see neither batches, losses, exceptions nor the beginning of an evaluation, and the trainer's calls of one callback
take 10 µs per step. The bridge therefore wraps methods of this one trainer and of its callback handler.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial, update_wrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from trainbus.bridges.bridge import Bridge
from trainbus.bridges.foreign_calls import time_transformers
from trainbus.bridges.hosted import TrainerHost, iterations_in
from trainbus.bridges.transformers import privates
from trainbus.bridges.transformers.evaluations import Evaluations, has_length
from trainbus.bridges.transformers.folders import Folders, check_folder, local, read_entry
from trainbus.bridges.transformers.iterations import publish_iterations, set_rates
from trainbus.bridges.transformers.saver import FolderSaver
from trainbus.eventloop.checkpoint import AnyPath
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training import Driver, HostedRun
from trainbus.eventloop.training.driver import EvaluationStage
from trainbus.eventloop.training.machine import EPOCH, ITERATION, Counters
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()

Method = Callable[..., Any]


class TransformersBridge(Bridge):
    """A bus in a ``transformers.Trainer``, or in a subclass such as TRL's trainers.

    - ``outputs["loss"]`` is the loss of the micro-batch as a detached tensor, times the number of micro-batches of its window
      if there are several. The mean over a window is the loss that the trainer logs.
    - Metrics have the names of ``compute_metrics``: the trainer's prefix ``eval_`` is removed.
    - A checkpoint is a folder. Requested checkpoints have the names given by hooks, in ``output_dir``. The trainer's own
      ``checkpoint-<step>`` folders hold the state of the bus, too. ``from_pretrained`` opens both.

    Args:
        bus: the bus.
        trainer: the trainer.
        checkpoints: write all checkpoints of ``train()`` beside the training, which waits only for a copy. A folder gets its
            name when it is complete and durable, and the folders that it replaces are removed afterwards. The end of
            ``train()`` waits for them. If a save fails, the next one, or the end of ``train()``, raises its error.
    """

    host, trains = "a transformers.Trainer", "train"
    missing: ClassVar[Mapping[str, str]] = {}
    instead: ClassVar[Mapping[str, str]] = {"work_dir": "files of hooks go to args.output_dir"}

    def __init__(self, bus: Any, trainer: Any, *, checkpoints: bool = False) -> None:
        privates.check(trainer)
        super().__init__(bus, trainer)
        self._folders = Folders(trainer)
        self._saver = FolderSaver(trainer, self._folders) if checkpoints else None
        self._host: TrainerHost
        self._drive: Driver
        self._resume: str | None = None
        self._called = self._looping = False
        self._evaluations = Evaluations(trainer)
        self._training: HostedRun | None = None  # the run, from the beginning of its first epoch until it ends
        self._epoch = 0  # counted by the trainer's loop, also if it cuts an epoch short
        self._length: int | None = None

    def install(self) -> None:
        """Wrap methods. The bridge runs before all callbacks, so that these may raise or evaluate."""
        moments: dict[str, Method] = {
            "on_train_begin": self._on_train_begin,
            "on_epoch_begin": self._on_epoch_begin,
            "on_epoch_end": self._on_epoch_end,
            "on_train_end": self._on_train_end,
        }
        if self._saver is not None:
            moments["on_save"] = self._saver.around_on_save
        around: dict[str, Method] = {
            "train": self._train,
            privates.TRAINING_LOOP: self._loop,
            "evaluate": partial(self._evaluate, "val"),
            "predict": partial(self._evaluate, "test"),
            "prediction_step": self._evaluations.prediction_step,
            privates.LOAD_BEST: self._load_best_model,
            privates.SAVE: self._save_checkpoint,
            "save_model": self._folders.save_model,
            privates.OUTPUT_DIR: self._output_dir,
        }
        for owner, wrappers in ((self.trainer.callback_handler, moments), (self.trainer, around)):
            for name, wrapper in wrappers.items():
                original = getattr(owner, name)
                # The trainer inspects some signatures.
                self.replace(owner, name, update_wrapper(partial(wrapper, original), original))

    # ---------------------------------------------------------------------------------------------------- the training

    def _train(self, original: Method, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:  # the trainer finds only folders with its own names
            resume_from_checkpoint = self._folders.newest() or True
        elif resume_from_checkpoint:
            check_folder(Path(resume_from_checkpoint))
        self._called = True
        try:
            return original(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._called = False

    def _loop(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's loop, which a smaller batch size may repeat after an error."""
        self._resume = kwargs.get("resume_from_checkpoint")
        self._looping = True
        try:
            with self._closing(), self._saver.open() if self._saver is not None else nullcontext():
                return original(*args, **kwargs)
        finally:
            self._looping = False

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """End the run that a block has begun, also after an exception."""
        try:
            yield
        except BaseException as error:
            if self.running is not None:
                if self._saver is not None:
                    self._saver.finish(error)
                self._drive.fail(error)
            raise
        finally:
            self._training = None
        if self.running is not None:
            self._drive.drop_evaluation()
            self._drive.end_run()

    def _on_train_begin(self, original: Method, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._looping:
            self._begin_train(state, self.trainer.callback_handler.train_dataloader)
        elif self._called:  # else by a shallow copy of the trainer, which shares the callbacks
            log.warning(
                f"{type(self.trainer).__name__} overrides the training loop, so no mount points are published",
                id="transformers-loop-overridden",
            )
        return original(args, state, control, **kwargs)

    def _begin_train(self, state: Any, data: Any) -> None:
        """Begin the run: from here on the model, the optimizer and the trainer's counts are known."""
        trainer = self.trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate's wrapper has no step hooks
        self._begin_run(optimizer)
        host, run, drive = self._host, self._host.run, self._drive
        run.foreign.schedulers = [SimpleNamespace(optimizer=one) for one in (optimizer, trainer.optimizer)]
        host.around_rates = partial(set_rates, trainer, optimizer)
        host.train_data, host.accumulation = data, trainer.args.gradient_accumulation_steps
        self._length = host.epoch_length = len(data) if has_length(data) else None
        publish_iterations(trainer, host, optimizer, self._save_or_stop)
        time_transformers(trainer, run)
        epoch, batches = self._position(state)
        unfinished = self._resume is not None and self._restore(state, self._resume, epoch, batches)
        drive.begin_train(**self._limits(state))
        if unfinished:  # the trainer saved after the last step of an epoch, and does not end that epoch again
            drive.begin_epoch()
            drive.end_epoch()
        self._epoch = epoch
        run.counters.go_to(epoch=run.counters.epoch, batches=batches)
        self._training = run

    def _begin_run(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        trainer, args = self.trainer, self.trainer.args
        host = TrainerHost(resume_way='trainer.train(resume_from_checkpoint="{}")')
        run = HostedRun(self.bus, model=trainer.model, optimizer=optimizer, work_dir=Path(args.output_dir), host=host)
        if optimizer is None:
            host.continue_from(self.run)
        self.run, self._host, self._drive = run, host, host.drive
        mixed = {"precision": "bf16" if args.bf16 else "fp16"} if args.bf16 or args.fp16 else {}
        schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        run.foreign.settings = mixed | {"schedule": schedule, "schedule.warmup_steps": args.warmup_steps}
        run.validates = True if args.eval_strategy != "no" or args.eval_on_start else None
        handler = signal.getsignal(signal.SIGTERM)
        self._drive.begin_run()
        if getattr(args, "enable_jit_checkpoint", False) and signal.getsignal(signal.SIGTERM) != handler:
            raise ConfigurationError(
                "enable_jit_checkpoint=True handles SIGTERM, and so does a hook on the bus (PreemptionHook); use one of them"
            )

    def _position(self, state: Any) -> tuple[int, int]:
        """Return the epoch and the number of its batches with which the trainer begins."""
        window = self.trainer.args.gradient_accumulation_steps
        epoch, steps = divmod(state.global_step, self._updates(state))
        return epoch, 0 if self.trainer.args.ignore_data_skip else steps * window

    def _updates(self, state: Any) -> int:
        """Return the number of windows in an epoch."""
        length = self._length or state.max_steps
        return max(1, math.ceil(length / self.trainer.args.gradient_accumulation_steps) if self._length else length)

    def _limits(self, state: Any) -> dict[str, int | None]:
        args, length = self.trainer.args, self._length
        if length and args.max_steps <= 0 and float(args.num_train_epochs).is_integer():
            return {"max_epochs": state.num_train_epochs or None}
        return {"max_iters": iterations_in(state.max_steps, args.gradient_accumulation_steps, length) or None}

    def _restore(self, state: Any, path: str, epoch: int, batches: int) -> bool:
        """Resume with the trainer; return True if the checkpoint was saved between the last step of an epoch and its end."""
        host, run = self._host, self._host.run
        entry = read_entry(Path(path))
        if entry is None:
            done = epoch * (self._length or 0) + batches
            host.resume_without_entry(Counters(epoch=epoch, iter=done, update=state.global_step, batches=batches), path)
        else:
            host.restore_entry(entry, path)
        unfinished = run.counters.epoch < epoch and run.counters.batches > 0 and not batches
        if not unfinished:
            run.counters.go_to(epoch=epoch, batches=batches)
        return unfinished

    def _on_epoch_begin(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        if self._training is not None:
            self._training.counters.go_to(epoch=self._epoch, batches=self._training.counters.batches)
            self._drive.begin_epoch()
        return original(*args, **kwargs)

    def _on_epoch_end(self, original: Method, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End an epoch; one that a stop has cut short is left without ``after_train_epoch``."""
        run = self._training
        if run is not None:
            self._drive.drop_evaluation()
            cut = control.should_training_stop or control.should_epoch_stop
            complete = run.counters.batches == self._length or state.global_step >= state.max_steps
            if cut and not complete:
                self._drive.abandon_epoch()
            else:
                self._drive.end_epoch()
            self._epoch += 1
        return original(args, state, control, **kwargs)

    def _on_train_end(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        self._end_train()
        return original(*args, **kwargs)

    def _end_train(self) -> None:
        """End the training, before the trainer loads the best model."""
        run = self._training
        if run is not None and run.training:
            self._drive.drop_evaluation()
            self._drive.end_train()
            self._host.saver.write_due(self._write)

    def _load_best_model(self, original: Method) -> None:
        if self._saver is not None:
            self._saver.wait_for_files()
        self._end_train()
        original()

    def _output_dir(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Return the directory of the folders. At the end of a training, the trainer then removes all but the best one."""
        if self._folders.writing is not None:
            return str(self._folders.writing)
        if self._saver is not None and self._saver.is_open:
            self._saver.wait_for_files()
        return original(*args, **kwargs)

    def _evaluate(self, stage: EvaluationStage, original: Method, *args: Any, **kwargs: Any) -> Any:
        run = self.running
        if self._evaluations.stage is not None or (run is not None and ITERATION in run.state.machine):
            return original(*args, **kwargs)  # one of several data sets, or at a point where a run has no evaluation
        if run is not None:
            return self._evaluations.evaluate(self._host, stage, original, *args, **kwargs)
        with self._closing():
            self._begin_run()
            return self._evaluations.evaluate(self._host, stage, original, *args, **kwargs)

    # -------------------------------------------------------------------------------------------------- the checkpoints

    def _save_or_stop(self) -> None:
        """Save or stop after the trainer has logged, evaluated and saved: a resumed run does not repeat these."""
        run, saver = self._host.run, self._host.saver
        # After the last step of an epoch the end of the epoch follows at once, and a run resumes better from there.
        if run.checkpointer.due and (EPOCH not in run.state.machine or run.counters.batches != self._length):
            saver.write_due(self._write)
        if run.state.stops and self._drive.should_stop():
            self.trainer.control.should_training_stop = True

    def _save_checkpoint(self, original: Method, model: Any, trial: Any = None) -> None:
        """Add the state of the bus to a checkpoint that the trainer saves."""
        run = self.running
        if run is None or self._folders.writing is not None:
            original(model, trial)
            return
        folder = self._folders.next(trial)
        writing = self._host.saver.writing(folder)
        filled = self._folders.filled(*self._host.gather_entry(str(folder)))
        if self._saver is not None and self._saver.is_open:
            with writing.copying(), filled:
                self._saver.save(partial(original, model, trial), folder, writing, own=True)
            return
        with writing, filled:
            original(model, trial)
            self._folders.sync(folder)

    def _write(self, path: AnyPath) -> None:
        """Make the trainer save a checkpoint under a name given by a hook."""
        saver = self._host.saver
        writing, filled = saver.writing(path), self._folders.filled(*self._host.gather_entry(str(path)))
        if self._saver is not None and self._saver.is_open:
            save = partial(privates.save, self.trainer)
            with writing.copying(), filled:
                self._saver.save(save, local(path), writing, own=False, raises=saver.raises)
            return
        with writing, filled:
            self._folders.write(path)
