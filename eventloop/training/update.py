"""The optimizer update: backward, clip and step as a subscriber of ``after_train_iter``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from trainbus.eventloop import events as ev
from trainbus.eventloop.bus.hook import Hook, mount
from trainbus.eventloop.bus.priority import Priority, PriorityLike
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError, TrainingError
from trainbus.eventloop.events.run_view import RunView
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import check_scaler, checks_overflow, foreach_mul_, is_overflown
from trainbus.eventloop.training.optimizers import check_step, enter_training_mode, parameters_of

log = get_logger()

Precision = Literal["bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALER_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


class Update(Hook):
    """Zero the gradients, backpropagate ``outputs["loss"]``, clip, and step every optimizer of the run.

    The run publishes ``before_optimizer_step`` and ``after_optimizer_step`` around each real step, after clipping.

    Args:
        accumulate: micro-batches per step; each loss is divided by it. A partial window at the end of an epoch also steps,
            with its gradients rescaled to the mean over its micro-batches.
        grad_clip: maximum norm of all gradients together, or the arguments of ``torch.nn.utils.clip_grad_norm_`` as a
            mapping (``{"max_norm": 1.0, "norm_type": 2}``), or a function that clips the gradients of a list of parameters in
            place. The norm before clipping is reported as ``grad_norm``; a function may return it.
        amp: ``"bf16"`` or ``"fp16"`` runs all forward passes under ``torch.autocast``; ``"fp16"`` adds a gradient scaler.
        scaler: a ``torch.amp.GradScaler``, or the arguments of the fp16 scaler as a mapping. Checkpoints hold its state. A
            step that it skips does not count as an update. The scaler itself syncs with the device once per step.

    Raises:
        ConfigurationError: an option does not fit, such as a scaler without ``amp="fp16"``; later: an optimizer's ``step``
            needs a closure.
        TrainingError: at the first iteration, the loss depends on no trainable parameter, or another update steps.
    """

    name = "training.update"
    priority: PriorityLike = Priority.HIGH
    observes = True  # it changes weights in iterations only, and each iteration is a new state anyway

    @check_options
    def __init__(
        self,
        *,
        accumulate: Annotated[int, Meta(ge=1)] = 1,
        grad_clip: float | Mapping[str, Any] | Callable[[list[torch.nn.Parameter]], Any] | None = None,
        amp: Precision | None = None,
        scaler: torch.amp.GradScaler | Mapping[str, Any] | None = None,
    ) -> None:
        self.accumulate = accumulate
        self._clip = _clip_options(grad_clip)
        self._amp: Precision | None = amp
        self._scaler_options = _scaler_options(scaler, amp) if isinstance(scaler, Mapping) else {}
        self._scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        self._count = 0
        self._begun = False
        self._optimizers: Mapping[str, torch.optim.Optimizer] = {}
        self._autocast: torch.autocast | None = None

    @property
    def window_open(self) -> bool:
        """True between the first micro-batch of a window and its step."""
        return self._count > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and, inside an accumulation window, the gradients accumulated so far."""
        state: dict[str, Any] = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        if self.window_open:
            gradients = {name: [p.grad for p in parameters_of(one)] for name, one in self._optimizers.items()}
            state["window"] = {"count": self._count, "gradients": gradients}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler and the open window; drop the window, with a warning, if the parameters differ."""
        scaler, window = state.get("scaler"), state.get("window")
        if scaler and self._scaler is not None:
            self._scaler.load_state_dict(dict(scaler))
        elif scaler or (self._scaler is not None and self._scaler.is_enabled()):
            log.warning(
                "only one of checkpoint and update has a gradient scaler; its state is not loaded", id="scaler-not-loaded"
            )
        if window is None:
            return
        saved, own = window["gradients"], {name: parameters_of(one) for name, one in self._optimizers.items()}
        fits = {name: len(some) for name, some in saved.items()} == {name: len(some) for name, some in own.items()}
        pairs = [pair for name in own for pair in zip(own[name], saved[name], strict=True)] if fits else []
        if fits and all(gradient is None or gradient.shape == parameter.shape for parameter, gradient in pairs):
            self._count = int(window["count"])
            for parameter, gradient in pairs:
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
        else:
            log.warning(
                "the checkpoint was saved inside an accumulation window, but its gradients do not fit these parameters; the "
                "window starts over",
                id="window-starts-over",
            )

    def unused(self) -> Collection[str]:
        """Return the autocast methods if ``amp`` is off, so that the bus skips their four events per iteration."""
        return () if self._amp is not None else ("enter_autocast", "leave_autocast")

    def before_run(self, event: ev.BeforeRun) -> None:
        """Create the fp16 scaler: the device is known, and no checkpoint is loaded yet."""
        self._count = 0
        self._begun = False
        self._optimizers = event.run.optimizers
        for optimizer in self._optimizers.values():
            check_step(optimizer)
        if self._amp == "fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(event.run.device.type, **self._scaler_options)
        if self._scaler is not None:
            check_scaler(self._scaler)
            state = self._scaler.state_dict()
            event.run.checkpoints.note_options("scaler", {name: state[name] for name in _SCALER_OPTIONS if name in state})

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context for forward passes, which does nothing if ``amp`` is off."""
        return torch.autocast(device.type, dtype=_DTYPES[self._amp or "bf16"], enabled=self._amp is not None)

    # Entered last and left first, so that no other handler runs under autocast.
    @mount(ev.BeforeForward, ev.BeforeValIter, ev.BeforeTestIter, priority=Priority.LOWEST)
    def enter_autocast(self, event: ev.BeforeForward | ev.BeforeValIter | ev.BeforeTestIter) -> None:
        """Enter autocast until the forward pass or the iteration ends."""
        self._autocast = self.autocast(event.run.device)
        self._autocast.__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.run.defer(self.leave_autocast)

    @mount(ev.AfterForward, ev.AfterValIter, ev.AfterTestIter, priority=Priority.HIGHEST)
    def leave_autocast(self, event: ev.AfterForward | ev.AfterValIter | ev.AfterTestIter | None = None) -> None:
        """Leave autocast, before metrics are computed."""
        if self._autocast is not None:
            autocast, self._autocast = self._autocast, None
            autocast.__exit__(None, None, None)

    def before_train_iter(self, event: ev.BeforeTrainIter) -> None:
        """Zero the gradients when a window begins; managers of replicas begin their step there, before the forward pass."""
        if self._count:
            return
        if not self._begun:  # not before: a resumed run may begin with a validation
            for optimizer in self._optimizers.values():
                enter_training_mode(optimizer)
        for optimizer in self._optimizers.values():
            if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
                optimizer.zero_grad(set_to_none=True)
                continue
            for group in optimizer.param_groups:  # like torch, but without its profiler range, which takes most of the time
                for parameter in group["params"]:
                    parameter.grad = None

    def after_train_iter(self, event: ev.AfterTrainIter) -> None:
        """Accumulate gradients, and step at the end of the window."""
        run: RunView = event.run
        loss = event.outputs["loss"]
        if not self._begun:
            self._begun = True
            self._check_step(run)
        self._count += 1
        if self.accumulate > 1:
            loss = loss / self.accumulate
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on any trainable parameter (requires_grad is False): did step() compute it under "
                "torch.no_grad(), detach it, or call backward()?"
            )
        if run.wants(ev.BeforeBackward):
            run.publish(ev.BeforeBackward, loss=loss)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        if run.wants(ev.AfterBackward):
            run.publish(ev.AfterBackward)
        if self._count >= self.accumulate or run.data.last_batch:
            if self._count < self.accumulate and (gradients := _gradients(run.optimizers.values())):
                foreach_mul_(gradients, self.accumulate / self._count)
            self._step(run)
            self._count = 0

    def _check_step(self, run: RunView) -> None:
        gradients = _gradients(run.optimizers.values())
        if run.updated or (not self._count and any(bool(gradient.any()) for gradient in gradients)):
            raise TrainingError(
                f"step() called backward() or optimizer.step(), but the update ({self.label}) does both: return the loss only, "
                "or write your own loop around Run"
            )

    def _step(self, run: RunView) -> None:
        optimizers = list(run.optimizers.values())
        try:
            self._step_all(run, optimizers)
        except Exception as error:
            for optimizer in optimizers:
                check_step(optimizer, error)
            raise

    def _step_all(self, run: RunView, optimizers: list[torch.optim.Optimizer]) -> None:
        if self._scaler is not None:
            # A scaler refuses an optimizer without gradients, such as one of two that this loss does not reach.
            optimizers = [optimizer for optimizer in optimizers if _gradients([optimizer])]
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        if self._clip is not None:
            if callable(self._clip):
                norm = self._clip([parameter for optimizer in optimizers for parameter in parameters_of(optimizer)])
            else:
                norm = run.steps.clip_grad_norm(optimizers=optimizers, **self._clip)
            if norm is not None:
                run.report(grad_norm=norm)
        for optimizer in optimizers:
            if self._scaler is None:
                optimizer.step()
            # The kernel of a fused optimizer checks for overflow, so the scaler calls its step() in any case.
            elif not checks_overflow(optimizer) or not is_overflown(self._scaler, optimizer):
                self._scaler.step(optimizer)
        if self._scaler is not None and optimizers:
            self._scaler.update()


def _clip_options(grad_clip: Any) -> Any:
    if grad_clip is None or callable(grad_clip):
        return grad_clip
    options = {"max_norm": grad_clip} if isinstance(grad_clip, int | float) else dict(grad_clip)
    unknown = options.keys() - {"max_norm", "norm_type", "error_if_nonfinite", "foreach"}
    largest = options.get("max_norm")
    if unknown or isinstance(largest, bool) or not isinstance(largest, int | float) or not largest > 0:
        raise ConfigurationError(
            f'grad_clip={grad_clip!r}: give the maximum norm, such as 1.0, or {{"max_norm": 1.0, "norm_type": 2}}, or a '
            "function that clips the gradients of a list of parameters"
        )
    return options


def _scaler_options(options: Mapping[str, Any], amp: Precision | None) -> dict[str, Any]:
    if amp != "fp16":
        raise ConfigurationError(f'scaler={dict(options)!r}: scaler arguments need amp="fp16", but amp={amp!r}')
    try:
        torch.amp.GradScaler("cpu", **options)  # checks the options
    except (TypeError, AssertionError) as error:
        raise ConfigurationError(f"scaler={dict(options)!r}: {error or 'a factor is out of range'}") from None
    return dict(options)


def _gradients(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [parameter.grad for one in optimizers for parameter in parameters_of(one) if parameter.grad is not None]


def check_updates(hooks: Iterable[Hook], *, update_steps: bool) -> None:
    """Raise ConfigurationError if more than one hook, or a hook and the user's own loop, would step the optimizers."""
    updates = [hook for hook in hooks if isinstance(hook, Update)]
    if updates and not update_steps:
        raise ConfigurationError(
            f"{updates[0].label} is on the bus, but the body of your own loop steps the optimizer: remove the hook, or use "
            "TrainLoop"
        )
    if len(updates) > 1:
        names = " and ".join(update.label for update in updates)
        raise ConfigurationError(
            f"{names} are optimizer updates: keep one. TrainLoop adds its own to a bus without one; add yours to the bus "
            "before you make the loop"
        )
