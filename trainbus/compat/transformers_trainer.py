"""The facade of a Trainer for callbacks of Hugging Face on a bus: call them at its moments, and act on their decisions."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any

from transformers.trainer_callback import TrainerControl
from transformers.trainer_utils import IntervalStrategy

from trainbus.compat.transformers_callbacks import Callbacks, Guest, State, arguments_for, is_local_first, schedule_of
from trainbus.compat.transformers_logs import LogLines, named, number_of_samples, speeds
from trainbus.eventloop import TrainbusError, events, get_logger
from trainbus.eventloop.events import RunView

log = get_logger()

KEY = "transformers"  # key of the state of callbacks in a checkpoint


class TrainerFacade:
    """Call all callbacks on a bus at the moments of a Trainer, and carry out their decisions.

    The hooks of the callbacks forward their events. The first one to forward an event calls all callbacks.
    """

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._hooks: list[Guest] = []
        self._handled: dict[type[events.Event], events.Event] = {}
        self._restored: dict[str, Any] | None = None
        self._list: Callbacks | None = None
        self._state, self._control = State(), TrainerControl()
        self._begun = self._in_epoch = self._in_window = False
        self._epoch = (0, 0)  # index of the epoch, and of its first iteration
        self._validated_from = 0.0
        # The states of checkpoints that are being written (by path), and of durable ones. A save ends on another thread.
        self._saving: dict[str, Any] = {}
        self._durable: deque[Any] = deque()
        self._reported = -1  # the step of the last durable one

    def join(self, hook: Guest) -> None:
        self._hooks.append(hook)

    def handle(self, event: events.Event) -> None:
        """Handle an event, once."""
        if self._handled.get(type(event)) is not event:
            self._handled[type(event)] = event
            getattr(self, event.mount_point)(event)

    # ------------------------------------------------------------------------------------------------- moments

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        self._epoch = (event.progress.epoch, event.progress.iter - event.progress.batch_idx)
        self._begin(event)
        self._begin_epoch()

    def before_train_iter(self, event: events.BeforeTrainIter) -> None:
        self._lines.before_iteration()
        if not self._in_epoch:
            self._begin_epoch()
        if not self._in_window:
            self._in_window = True
            self._call("on_step_begin")

    def before_optimizer_step(self, event: events.BeforeOptimizerStep) -> None:
        self._call("on_pre_optimizer_step")

    def after_optimizer_step(self, event: events.AfterOptimizerStep) -> None:
        self._call("on_optimizer_step")

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        self._lines.add_iteration(event.outputs, event.batch)
        if not event.run.updated:
            self._call("on_substep_end")
            self._stop_if_asked()
            return
        step = event.progress.update
        self._lines.close_window(step)
        self._in_window = False
        self._count(step + 1, event.progress.iter + 1)
        args = self._args
        by_steps = args.logging_strategy == IntervalStrategy.STEPS
        if (by_steps and (step + 1) % self._state.logging_steps == 0) or (step == 0 and args.logging_first_step):
            self._control.should_log = True
        self._call("on_step_end")
        self._decide()
        self._stop_if_asked()
        length = event.run.data.epoch_length
        if event.progress.max_iters is not None and length and (event.progress.iter + 1) % length == 0:
            self._end_epoch()

    def after_train_epoch(self, event: events.AfterTrainEpoch) -> None:
        if self._in_epoch:
            self._end_epoch()

    def after_train(self, event: events.AfterTrain) -> None:
        self._begin(event)
        if self._in_epoch:  # a stop cut it short; a Trainer ends such an epoch
            self._end_epoch(goes_on=False)
        self._store_flos()
        self._log(self._lines.summary(event.progress, self._state.total_flos))
        self._call_on_save(wait=True)
        self._call("on_train_end")

    def after_run(self, event: events.AfterRun) -> None:
        self._call_on_save(wait=True)

    def before_val(self, event: events.BeforeVal | events.BeforeTest) -> None:
        self._prepare(event)
        if event.run.training:
            self._begin(event)
        self._count(event.progress.update, event.progress.iter)
        self._callbacks.eval_dataloader = event.run.data.evaluation
        self._validated_from = time.time()

    before_test = before_val

    def after_val_iter(self, event: events.AfterValIter | events.AfterTestIter) -> None:
        self._call("on_prediction_step")

    after_test_iter = after_val_iter

    def after_val_epoch(self, event: events.AfterValEpoch) -> None:
        metrics = self._metrics("eval", event)
        self._log(metrics)
        self._call("on_evaluate", metrics)
        if event.run.training:
            self._state.take_best(metrics, self._args, named=any(_names_metric(hook.args) for hook in self._hooks))
            if self._control.should_save:
                self._save()
            self._stop_if_asked()

    def after_test_epoch(self, event: events.AfterTestEpoch) -> None:
        self._call("on_predict", self._metrics("test", event))

    # ------------------------------------------------------------------------------------------------ checkpoints

    def before_save_checkpoint(self, event: events.BeforeSaveCheckpoint) -> None:
        if self._list is None:
            return
        self._store_flos()
        self._state.stateful_callbacks = State(stateful_callbacks=self._callbacks.exported()).stateful_callbacks
        event.checkpoint[KEY] = {"state": self._state.known(), "meter": self._lines.state_dict()}

    def after_load_checkpoint(self, event: events.AfterLoadCheckpoint) -> None:
        self._restored = event.checkpoint.get(KEY)
        if self._restored is None:
            log.warning(
                "the checkpoint has no state of callbacks; they start anew", id="no-state-for-callbacks", path=event.path
            )

    def checkpoint_staged(self, event: events.CheckpointStaged) -> None:
        self._saving[event.path] = copy(self._state)

    def checkpoint_committed(self, event: events.CheckpointCommitted) -> None:
        if (state := self._saving.pop(event.path, None)) is not None:
            self._durable.append(state)

    def checkpoint_failed(self, event: events.CheckpointFailed | events.CheckpointSkipped) -> None:
        self._saving.pop(event.path, None)

    checkpoint_skipped = checkpoint_failed

    def _call_on_save(self, *, wait: bool = False) -> None:
        if wait and self._saving:
            self._run.checkpoints.wait()
        while self._durable:
            state = self._durable.popleft()
            if state.global_step != self._reported:
                self._reported = state.global_step
                # Not on_save() of the list: it clears should_save, which may be set for the next save by now.
                self._control = self._callbacks.call_event("on_save", self._args, state, self._control)

    # ------------------------------------------------------------------------------------------ parts of the moments

    @property
    def _callbacks(self) -> Callbacks:
        assert self._list is not None  # noqa: S101 - _prepare() made it
        return self._list

    def _call(self, moment: str, *given: Any) -> None:
        self._control = getattr(self._callbacks, moment)(self._args, self._state, self._control, *given)

    def _prepare(self, event: events.RunEvent) -> None:
        """Create the arguments of callbacks, before the first call."""
        if self._list is not None:
            return
        run = event.run
        self._args = arguments_for(self._hooks, run, event.progress)
        processing = next((hook.processing_class for hook in self._hooks if hook.processing_class is not None), None)
        self._list = Callbacks([hook.guest for hook in self._hooks], run, processing)
        self._state = State(stateful_callbacks=self._list.exported())
        self._lines = LogLines(run, nan_filter=self._args.logging_nan_inf_filter)
        if self._restored is not None:
            self._restore(self._restored, self._list)
        self._state.is_world_process_zero = run.rank == 0
        self._state.is_local_process_zero = is_local_first(run.rank)
        self._count(event.progress.update, event.progress.iter)
        self._list.lr_scheduler = schedule_of(run)
        self._call("on_init_end")

    before_train = _prepare

    def _restore(self, saved: dict[str, Any], callbacks: Callbacks) -> None:
        known = {field.name for field in fields(State)}
        for name, value in saved["state"].items():
            if name in known:
                setattr(self._state, name, value)
        self._lines.load_state_dict(saved["meter"])
        if unknown := callbacks.restore(saved["state"].get("stateful_callbacks", {})):
            log.warning(
                "the checkpoint has state of callbacks that are not on the bus",
                id="state-of-unknown-callbacks",
                callbacks=unknown,
            )

    def _begin(self, event: events.RunEvent) -> None:
        """Take the lengths of the training, as far as they are known; begin it with its first epoch."""
        self._state.measure(event.run, event.progress, self._args, resumed=self._restored is not None)
        self._callbacks.train_dataloader, self._callbacks.lr_scheduler = event.run.data.train, schedule_of(event.run)
        if self._begun:
            return
        self._begun = True
        self._state.epoch = self._state.epoch or 0  # None before it in Transformers up to 5.3
        self._lines.begin(event.progress, resumed=self._restored is not None)
        self._call("on_train_begin")

    def _count(self, step: int, iterations: int) -> None:
        """Set the steps and the epochs so far."""
        epoch, begin = self._epoch
        length = self._run.data.epoch_length
        whole, rest = divmod(iterations - begin, length) if length else (0, 0)
        self._state.global_step = step
        if self._begun:
            self._state.epoch = epoch + whole + (rest / length if length else 0.0)

    def _begin_epoch(self) -> None:
        self._in_epoch = True
        self._call("on_epoch_begin")

    def _end_epoch(self, *, goes_on: bool = True) -> None:
        self._in_epoch = False
        if self._args.logging_strategy == IntervalStrategy.EPOCH:
            self._control.should_log = True
        self._call("on_epoch_end")
        self._decide(evaluates=goes_on)
        self._stop_if_asked()

    # -------------------------------------------------------------------------------------------------- decisions

    def _decide(self, *, evaluates: bool = True) -> None:
        """Log, validate and save if a callback asks for it, in this order."""
        self._call_on_save()
        step = self._state.global_step
        if self._control.should_log and step > self._lines.logged:
            logs = self._lines.line(step)
            self._store_flos()
            self._log(logs)
        if self._control.should_evaluate and evaluates:
            self._ask("should_evaluate", self._run.validate_now)  # a save follows it
        elif self._control.should_save:
            self._save()

    def _stop_if_asked(self) -> None:
        control, state = self._control, self._state
        if self._in_epoch and control.should_epoch_stop:
            self._ask("should_epoch_stop", self._run.end_epoch)
        ends = state.global_step >= state.known().get("max_steps", math.inf)
        if control.should_training_stop and not control.should_evaluate and not ends:
            self._run.stop(f"{self._callbacks.set_by.get('should_training_stop', 'a callback')} set should_training_stop")

    def _save(self) -> None:
        self._control.should_save = False
        self._ask("should_save", self._run.checkpoints.save)

    def _ask(self, flag: str, request: Callable[[], object]) -> None:
        """Send a request to the run; an error names the callback."""
        try:
            request()
        except TrainbusError as error:
            raise type(error)(f"{self._callbacks.set_by.get(flag, 'a callback')} set control.{flag}: {error}") from error

    def _log(self, logs: dict[str, Any]) -> None:
        logs["epoch"] = self._state.epoch
        self._state.log_history.append({**logs, "step": self._state.global_step})
        self._call("on_log", logs)

    def _store_flos(self) -> None:
        self._state.total_flos += self._lines.flos
        self._lines.flos = 0.0

    def _metrics(self, prefix: str, event: events.AfterValEpoch | events.AfterTestEpoch) -> dict[str, Any]:
        samples = number_of_samples(event.run.data.evaluation)
        speed = speeds(prefix, self._validated_from, samples, event.run.data.evaluation_length)
        return named(prefix, event.metrics) | speed


def _names_metric(args: Any) -> bool:
    """Return True if the user named the best model's metric. The default one may be absent."""
    return "metric_for_best_model" in args if isinstance(args, Mapping) else args is not None
