"""The training iterations of a ``lightning.Trainer``.

These methods are replaced while a training runs, because Lightning's callbacks lack their data or cost more:

- ``strategy.on_train_batch_start`` begins an iteration. Each call of a callback costs two microseconds more.
- ``strategy.training_step`` returns the outputs before the loss is divided by ``accumulate_grad_batches``, and is the forward
  pass. It runs inside ``optimizer.step(closure)``, so torch's step hook comes before it: see :meth:`Iterations._before_step`.

An iteration without subscribers is only counted. A handler that is subscribed during such an iteration gets the next one.

Lightning's tuner (``lr_find()``, ``scale_batch_size()``) trains for a few steps with other ``trainer.callbacks``, also inside
a training. These steps are none of the run, so all of the above passes them on while the bridge is not among the callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from trainbus.bridges.copies import replaced
from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.lightning import privates
from trainbus.eventloop import events as ev
from trainbus.eventloop.training.machine import EPOCH, ITERATION
from trainbus.eventloop.training.optimizers import stepping

_EVENTS: Final[tuple[type[ev.Event], ...]] = (
    ev.BeforeTrainIter,
    ev.BeforeForward,
    ev.AfterForward,
    ev.BeforeBackward,
    ev.AfterBackward,
    ev.BeforeOptimizerStep,
    ev.AfterOptimizerStep,
    ev.AfterTrainIter,
)


class Iterations:
    """Publish and count the iterations of one training, until its run ends.

    ``begin_epoch`` is called with the number of the next batch if Lightning resumes in the middle of an epoch, ``save_or_stop``
    after an iteration if a save or a stop may be due.
    """

    def __init__(
        self,
        callback: Any,
        trainer: Any,
        host: TrainerHost,
        begin_epoch: Callable[[int], object],
        save_or_stop: Callable[[], object],
    ) -> None:
        self._callback = callback
        self._trainer = trainer
        self._host, self._run, self._drive = host, host.run, host.drive
        self._begin_epoch, self._save_or_stop = begin_epoch, save_or_stop
        run, self._checkpointer = host.run, host.run.checkpointer
        self._wants, self._state, self._machine = run.wants, run.state, run.state.machine
        self._progress = trainer.fit_loop.epoch_loop.batch_progress
        self.step_fetches = privates.step_fetches(trainer)
        self._undo: list[Callable[[], object]] = []
        self._published = False  # True if events of the present iteration are published
        self._batch: Any = None
        self._waits: Callable[[], None] | None = None
        """The function to call before the step of an optimizer; its ``step(closure)`` begins with forward and backward."""
        self.length: float = 0
        self.last = False  # True if the present batch is the last one of its epoch
        strategy = trainer.strategy
        self._strategy_start = _overridden(strategy, "on_train_batch_start")
        self._strategy_step = strategy.training_step
        callback.on_train_batch_end = self.end
        run.defer(self._forget)
        run.defer(replaced(strategy, "on_train_batch_start", self.begin))
        for optimizer in run.optimizers.values():
            after_step = partial(self._after_step, host.around_step(optimizer)[1])
            run.defer(stepping(optimizer).register_step_post_hook(after_step).remove)

    def _forget(self) -> None:
        self._listen(listens=False)
        self._callback.on_train_batch_end = None
        self._batch = None

    # ---------------------------------------------------------------------------------------------- one iteration

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Replace ``strategy.on_train_batch_start``."""
        # This method and end() make few calls: after a step of the model each costs about a microsecond.
        if self._strategy_start is not None:
            self._strategy_start(batch, batch_idx)
        if self._callback not in self._trainer.callbacks:
            return
        if self._machine.innermost is not EPOCH:
            self._begin_epoch(batch_idx)
        self.last = batch_idx + 1 >= self.length or self._progress.is_last_batch
        wants = self._wants
        for event in _EVENTS:
            if wants(event):
                break
        else:
            if self._published:
                self._listen(listens=False)
            self._drive.begin_iteration(None, last=self.last)
            return
        if not self._published:
            self._listen(listens=True)
        self._choose_hooks()
        self._batch, self._waits = None if self.step_fetches else batch, None
        self._drive.begin_iteration(self._batch, last=self.last)

    def end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Replace ``callback.on_train_batch_end``."""
        accumulate, drive, state = trainer.accumulate_grad_batches, self._drive, self._state
        if self.step_fetches or self._machine.innermost is not ITERATION:
            self._catch_up(batch, batch_idx)
        self._host.window_open = accumulate > 1 and not self.last and (batch_idx + 1) % accumulate != 0
        if self._published:
            drive.end_iteration()
            self._batch = None
        else:
            drive.end_iteration(silent=True)
        if state.urgent or self._checkpointer.due:
            self._save_or_stop()

    def _catch_up(self, batch: Any, batch_idx: int) -> None:
        """Tell the run what is known only now: a batch that a step has fetched itself, or one that is None.

        Lightning leaves out a batch that is None, but reports its end.
        """
        begun = self._machine.innermost is ITERATION
        if not begun and self._machine.innermost is not EPOCH:
            self._begin_epoch(batch_idx)
        self.last = batch_idx + 1 >= self.length or self._progress.is_last_batch
        if begun:
            self._drive.replace_batch(batch, last=self.last)
        else:
            if self._published:
                self._listen(listens=False)
            self._drive.begin_iteration(None, last=self.last, silent=True)

    def _listen(self, *, listens: bool) -> None:
        """Install or remove the functions that publish events in Lightning and torch."""
        self._published = listens
        strategy, callback = self._trainer.strategy, self._callback
        callback.on_before_backward = callback.on_after_backward = callback.on_before_optimizer_step = None
        if listens:
            self._undo = [replaced(strategy, "training_step", self._training_step)]
            for optimizer in self._run.optimizers.values():
                before_step = partial(self._before_step, self._host.around_step(optimizer)[0])
                self._undo.append(stepping(optimizer).register_step_pre_hook(before_step).remove)
        else:
            while self._undo:
                self._undo.pop()()

    def _choose_hooks(self) -> None:
        """Set the methods that have subscribers. Lightning skips None faster than it calls an empty method."""
        callback, wants = self._callback, self._wants
        callback.on_before_backward = self._before_backward if wants(ev.BeforeBackward) else None
        callback.on_after_backward = self._after_backward if wants(ev.AfterBackward) else None
        callback.on_before_optimizer_step = self._gradients_complete if wants(ev.BeforeOptimizerStep) else None

    def _training_step(self, *arguments: Any, **options: Any) -> Any:
        run = self._run
        if self._callback not in self._trainer.callbacks:
            return self._strategy_step(*arguments, **options)
        if run.wants(ev.BeforeForward):
            run.publish(ev.BeforeForward, batch=self._batch)
        output = self._strategy_step(*arguments, **options)
        outputs = run.state.outputs
        if type(output) is torch.Tensor:
            outputs["loss"] = output
        else:
            outputs.update(named(output))
        if run.wants(ev.AfterForward):
            run.publish(ev.AfterForward, outputs=outputs)
        return output

    def _before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self._run.publish(ev.BeforeBackward, loss=loss)

    def _after_backward(self, trainer: Any, module: Any) -> None:
        self._run.publish(ev.AfterBackward)

    # A step with a closure first runs the forward and backward passes; then Lightning calls on_before_optimizer_step. A
    # gradient scaler, and a module that steps torch's own optimizer, call step() without a closure, when the gradients are
    # complete.

    def _before_step(self, before_step: Callable[[], None], _: Any, arguments: tuple[Any, ...], options: Any) -> None:
        if self._callback not in self._trainer.callbacks:
            return
        if (arguments[1:2] or (options.get("closure"),))[0] is None:
            before_step()
        else:
            self._waits = before_step

    def _after_step(self, after_step: Callable[[], None], *step: Any) -> None:
        if self._callback in self._trainer.callbacks:
            after_step()

    def _gradients_complete(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
        before_step, self._waits = self._waits, None
        if before_step is not None:
            before_step()


def named(output: Any) -> dict[str, Any]:
    """Return the result of a step as named outputs."""
    if isinstance(output, Mapping):
        return dict(output)
    return {"loss": output} if isinstance(output, torch.Tensor) else {}


def _overridden(strategy: Any, name: str) -> Callable[..., None] | None:
    """Return a method of a strategy; None if it is inherited from Lightning's base class, where it does nothing."""
    for kind in type(strategy).__mro__:
        if name in vars(kind):
            return None if kind.__name__ == "Strategy" else getattr(strategy, name)
    return None
