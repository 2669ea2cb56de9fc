"""The iterations of a ``transformers.Trainer``: batches, losses and real steps, which its callbacks do not get.

The wrappers are closures of one training, and are in place only while it lasts: in an iteration without subscribers each
further call costs the training about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from trainbus.bridges.copies import replaced
from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.transformers import privates
from trainbus.eventloop import events as ev
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training import HostedRun
from trainbus.eventloop.training.machine import EPOCH
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()

Method = Callable[..., Any]


def publish_iterations(
    trainer: Any, host: TrainerHost, optimizer: torch.optim.Optimizer, save_or_stop: Callable[[], object]
) -> None:
    """Publish the iterations of a training until its run ends.

    ``save_or_stop`` is called after the trainer has logged, evaluated and saved, if a hook waits for a save or a stop.
    """
    handler, run, steps = trainer.callback_handler, host.run, _Steps(trainer, host, optimizer)
    training_step, loss = _around_training_step(trainer, host, steps)
    on_substep_end = _around_end(handler.on_substep_end, host, loss, None)
    on_step_end = _around_end(handler.on_step_end, host, loss, steps)
    log_save_evaluate = _around_log_save_evaluate(trainer, host, save_or_stop)
    run.defer(replaced(trainer, "training_step", training_step))
    run.defer(replaced(handler, "on_substep_end", on_substep_end))
    run.defer(replaced(handler, "on_step_end", on_step_end))
    run.defer(replaced(trainer, privates.LOG_SAVE_EVALUATE, log_save_evaluate))


class _Steps:
    """The steps of the optimizer. Torch's hooks see the real ones; they are registered only where that is needed."""

    def __init__(self, trainer: Any, host: TrainerHost, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._optimizer = host.run, optimizer
        self._before, self._after = host.around_step(optimizer)
        self.all_happen = trainer.accelerator.scaler is None
        """True if each window ends with a step; False if a gradient scaler skips some."""
        if not self.all_happen:
            self._before, self._after = _unless_skipped(optimizer, self._before), _unless_skipped(optimizer, self._after)
            self.watch()

    def watch(self) -> None:
        """Count and publish steps until the present scope ends: the run with a scaler, else one iteration."""
        self._run.defer(self._optimizer.register_step_pre_hook(self._before).remove)
        self._run.defer(self._optimizer.register_step_post_hook(self._after).remove)


def _around_training_step(trainer: Any, host: TrainerHost, steps: _Steps) -> tuple[Method, Callable[[], Any]]:
    """Return the training step with its events, and a function that returns the loss of the last one."""
    original, run, drive, wants = trainer.training_step, host.run, host.drive, host.run.wants
    machine, counters, length = run.state.machine, run.counters, host.epoch_length
    all_happen, loss = steps.all_happen, None

    @wraps(original)
    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal loss
        if machine.innermost is not EPOCH:
            drive.drop_evaluation()
        drive.begin_iteration(inputs, last=counters.batches + 1 == length)
        if all_happen and (wants(ev.BeforeOptimizerStep) or wants(ev.AfterOptimizerStep)):
            steps.watch()
        if wants(ev.BeforeForward) or wants(ev.AfterForward) or wants(ev.BeforeBackward) or wants(ev.AfterBackward):
            with _publishing_passes(trainer, run, inputs):
                loss = original(model, inputs, *args, **kwargs)
        else:
            loss = original(model, inputs, *args, **kwargs)
        return loss

    def whole_loss() -> Any:
        """Return the loss as if its window had one micro-batch."""
        window = trainer.current_gradient_accumulation_steps
        return loss if window == 1 or loss is None else loss * window

    return training_step, whole_loss


@contextmanager
def _publishing_passes(trainer: Any, run: HostedRun, inputs: Any) -> Iterator[None]:
    """Publish around the forward and the backward pass of a block."""
    # A search for hyper-parameters makes a new accelerator.
    forward, backward = trainer.compute_loss, trainer.accelerator.backward

    @wraps(forward)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        run.publish(ev.BeforeForward, batch=inputs)
        result = forward(*args, **kwargs)
        run.publish(ev.AfterForward, outputs={"loss": result[0] if isinstance(result, tuple) else result})
        return result

    @wraps(backward)
    def differentiate(loss: Any, *args: Any, **kwargs: Any) -> None:
        run.publish(ev.BeforeBackward, loss=loss)
        backward(loss, *args, **kwargs)
        run.publish(ev.AfterBackward)

    with ExitStack() as undo:
        undo.callback(replaced(trainer, "compute_loss", compute_loss))
        undo.callback(replaced(trainer.accelerator, "backward", differentiate))
        yield


def _around_end(original: Method, host: TrainerHost, loss: Method, steps: _Steps | None) -> Method:
    """Return ``on_substep_end``, or with the steps ``on_step_end``, at whose call the trainer has counted the step."""
    drive, state, wants, window_open = host.drive, host.run.state, host.run.wants, steps is None
    stepped = {id(one): 1 for one in host.run.optimizers.values()} if steps is not None and steps.all_happen else {}

    @wraps(original)
    def on_end(*args: Any) -> Any:
        host.window_open = window_open
        state.stepped.update(stepped)
        drive.end_iteration({"loss": loss()} if wants(ev.AfterTrainIter) else None)
        return original(*args)

    return on_end


def _around_log_save_evaluate(trainer: Any, host: TrainerHost, save_or_stop: Callable[[], object]) -> Method:
    original, state, checkpointer = getattr(trainer, privates.LOG_SAVE_EVALUATE), host.run.state, host.run.checkpointer

    @wraps(original)
    def log_save_evaluate(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if state.agreed.stop or checkpointer.due:
            save_or_stop()

    return log_save_evaluate


def _unless_skipped(optimizer: torch.optim.Optimizer, hook: Method) -> Method:
    # A gradient scaler calls a fused optimizer in any case, and the kernel skips the step if this flag is set.
    attributes = vars(optimizer)

    def unless_skipped(*step: Any) -> None:
        flag = attributes.get("found_inf")
        if flag is None or not flag.item():
            hook()

    return unless_skipped


def set_rates(trainer: Any, optimizer: torch.optim.Optimizer, set_new: Callable[[], None]) -> None:
    """Set the new rates of ``run.set_lr()`` with ``set_new``, and scale the rest of the trainer's schedule."""
    before = [float(group["lr"]) for group in optimizer.param_groups]
    set_new()
    after, scheduler = [float(group["lr"]) for group in optimizer.param_groups], trainer.lr_scheduler
    if before == after or not hasattr(scheduler, "base_lrs"):
        return
    if 0.0 in before:
        log.warning(
            "the schedule's rate is 0 now, so run.set_lr() cannot scale its later rates",
            id="transformers-rate-not-scaled",
            lr=after,
        )
    bases = zip(scheduler.base_lrs, before, after, strict=True)
    scheduler.base_lrs = [base * new / old if old else base for base, old, new in bases]
