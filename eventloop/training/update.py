"""The optimizer update: backward, clip and step as a subscriber of ``after_train_iter``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from eventloop.bus.hook import Hook, mount
from eventloop.bus.priority import Priority, PriorityLike
from eventloop.checks import check_options
from eventloop.errors import ConfigurationError, TrainingError
from eventloop.events import (
    AfterBackward,
    AfterForward,
    AfterTestIter,
    AfterTrainIter,
    AfterValIter,
    BeforeBackward,
    BeforeForward,
    BeforeRun,
    BeforeTestIter,
    BeforeTrainIter,
    BeforeValIter,
)
from eventloop.events.run_view import RunView
from eventloop.log import get_logger

log = get_logger()

Precision = Literal["bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALER_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


class Update(Hook):
    """Zeroes gradients, differentiates ``outputs["loss"]``, clips and steps every optimizer of the run.

    ``before_optimizer_step`` and ``after_optimizer_step`` are published around each real step, after clipping.

    Args:
        accumulate: micro-batches per step; each loss is divided by it. A window that an epoch's end cuts short steps with
            its gradients rescaled to the mean over the micro-batches it has.
        grad_clip: largest norm of all gradients together, or the arguments of ``torch.nn.utils.clip_grad_norm_`` as a
            mapping (``{"max_norm": 1.0, "norm_type": 2}``). The norm before clipping is reported as ``grad_norm``.
        amp: ``"bf16"`` or ``"fp16"`` runs forward passes (validation and test, too) under ``torch.autocast``; ``"fp16"``
            brings a gradient scaler.
        scaler: a ``torch.amp.GradScaler`` to use instead, or the arguments of fp16's own as a mapping. A step it skips is
            no update; to know, the scaler reads a flag back from the device once a step (its own host sync). Its state is in
            the checkpoint.

    Raises:
        ConfigurationError: an option out of range.
    """

    name = "training.update"
    priority: PriorityLike = Priority.HIGH
    observes = True  # but for its iterations, each of which is another state anyway

    @check_options
    def __init__(
        self,
        *,
        accumulate: Annotated[int, Meta(ge=1)] = 1,
        grad_clip: float | Mapping[str, Any] | None = None,
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
        """Return the scaler's state and, if a checkpoint is made inside an accumulation window, the gradients so far."""
        state: dict[str, Any] = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        if self.window_open:
            gradients = {name: [p.grad for p in _parameters(one)] for name, one in self._optimizers.items()}
            state["window"] = {"count": self._count, "gradients": gradients}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back. A window of other parameters begins anew."""
        self._load_scaler(state.get("scaler"))
        window = state.get("window")
        if window is None:
            return
        saved = window["gradients"]
        own = {name: _parameters(one) for name, one in self._optimizers.items()}
        if not _fit(saved, own):
            log.warning(
                "the checkpoint was made in an accumulation window, and its gradients are not those of these parameters; the "
                "window begins anew"
            )
            return
        self._count = int(window["count"])
        for name, gradients in saved.items():
            for parameter, gradient in zip(own[name], gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def unused(self) -> Collection[str]:
        """Autocast's methods, where there is none: four events an iteration are not even made for them."""
        return () if self._amp is not None else ("enter_autocast", "leave_autocast")

    def before_run(self, event: BeforeRun) -> None:
        """Make the scaler that fp16 needs, now that the device is known and before a checkpoint is loaded into it."""
        self._count = 0
        self._begun = False
        self._optimizers = event.run.optimizers
        if self._amp == "fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(event.run.device.type, **self._scaler_options)
        if self._scaler is not None:
            state = self._scaler.state_dict()
            event.run.note_options("scaler", {name: state[name] for name in _SCALER_OPTIONS if name in state})

    # Entered last and left first, so that no other handler runs under autocast. What is validated is what is trained.
    @mount(BeforeForward, BeforeValIter, BeforeTestIter, priority=Priority.LOWEST)
    def enter_autocast(self, event: BeforeForward | BeforeValIter | BeforeTestIter) -> None:
        """Enter autocast; left after the forward pass, or when the iteration ends by an exception."""
        self._autocast = torch.autocast(event.run.device.type, dtype=_DTYPES[self._amp or "bf16"])
        self._autocast.__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.run.defer(self._leave_autocast)

    @mount(AfterForward, AfterValIter, AfterTestIter, priority=Priority.HIGHEST)
    def leave_autocast(self, event: AfterForward | AfterValIter | AfterTestIter) -> None:
        """Leave autocast, before metrics are computed."""
        self._leave_autocast()

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        """Zero the gradients where a window begins, before its first forward pass: torchft's wrapper begins a step by that."""
        if not self._count:
            for optimizer in self._optimizers.values():
                _zero_grad(optimizer)

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Update the weights."""
        run: RunView = event.run
        loss = event.outputs["loss"]
        if not self._begun:
            self._begun = True
            self._check_step(run)
        self._count += 1
        self._backward(run, loss if self.accumulate == 1 else loss / self.accumulate)
        if self._count >= self.accumulate or run.last_batch:
            if self._count < self.accumulate:
                _scale_gradients(run.optimizers.values(), self.accumulate / self._count)
            self._step(run)
            self._count = 0

    def _check_step(self, run: RunView) -> None:
        """Raise TrainingError if the step of the first iteration made the update itself."""
        gradients = [p.grad for optimizer in run.optimizers.values() for p in _parameters(optimizer) if p.grad is not None]
        if run.updated or (not self._count and any(bool(gradient.any()) for gradient in gradients)):
            raise TrainingError(
                "step() has called backward() or optimizer.step() itself: return the loss and leave both to the update "
                f"({self.label}); where your code is to make the update, write the loop around Run"
            )

    def _backward(self, run: RunView, loss: torch.Tensor) -> None:
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on any trainable parameter (requires_grad is False); was it made under "
                "torch.no_grad() or detached in step()? (step() returns the loss and calls no backward())"
            )
        run.publish(BeforeBackward, loss=loss)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        run.publish(AfterBackward)

    def _step(self, run: RunView) -> None:
        optimizers = list(run.optimizers.values())
        if self._scaler is not None:
            # A scaler refuses optimizers without any gradient (one of two that this loss does not reach).
            optimizers = [optimizer for optimizer in optimizers if any(p.grad is not None for p in _parameters(optimizer))]
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        if self._clip is not None:
            parameters = [parameter for optimizer in optimizers for parameter in _parameters(optimizer)]
            norm = torch.nn.utils.clip_grad_norm_(parameters, **self._clip)
            run.report(grad_norm=norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # sharded: add the others' parts
        for optimizer in optimizers:
            if self._scaler is None:
                optimizer.step()
            elif not _skips_by_itself(optimizer) or not _overflown(self._scaler, optimizer):
                self._scaler.step(optimizer)
        if self._scaler is not None and optimizers:
            self._scaler.update()

    def _load_scaler(self, state: Mapping[str, Any] | None) -> None:
        if state and self._scaler is not None:
            self._scaler.load_state_dict(dict(state))
        elif state or (self._scaler is not None and self._scaler.is_enabled()):
            log.warning("either the checkpoint or this update has a gradient scaler, the other has not; nothing is loaded")

    def _leave_autocast(self) -> None:
        if self._autocast is not None:
            autocast, self._autocast = self._autocast, None
            autocast.__exit__(None, None, None)


def _zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Forget gradients; torch's own way, without the profiler range that makes up most of its time."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """True for fused optimizers, whose step() checks for overflow inside its kernel."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _overflown(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    # torch has no public way to ask; this is what GradScaler.step itself asks for optimizers that are not fused.
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag.item()) for flag in found.values())


def _clip_options(grad_clip: float | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if grad_clip is None:
        return None
    options = {"max_norm": grad_clip} if isinstance(grad_clip, int | float) else dict(grad_clip)
    unknown = options.keys() - {"max_norm", "norm_type", "error_if_nonfinite", "foreach"}
    largest = options.get("max_norm")
    if unknown or isinstance(largest, bool) or not isinstance(largest, int | float) or not largest > 0:
        raise ConfigurationError(
            f'grad_clip={grad_clip!r}: give the largest norm, such as 1.0, or {{"max_norm": 1.0, "norm_type": 2}}'
        )
    return options


def _scaler_options(options: Mapping[str, Any], amp: Precision | None) -> dict[str, Any]:
    if amp != "fp16":
        raise ConfigurationError(
            f'scaler={dict(options)!r} are the arguments of the scaler that amp="fp16" brings, not amp={amp!r}'
        )
    try:
        torch.amp.GradScaler("cpu", **options)  # checks the options
    except (TypeError, AssertionError) as error:
        raise ConfigurationError(f"scaler={dict(options)!r}: {error or 'a factor is out of range'}") from None
    return dict(options)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fit(gradients: Mapping[str, list[Any]], parameters: Mapping[str, list[Any]]) -> bool:
    """True if gradients, None for none, have the shapes of parameters."""
    return gradients.keys() == parameters.keys() and all(
        len(some) == len(parameters[name])
        and all(one is None or one.shape == own.shape for one, own in zip(some, parameters[name], strict=True))
        for name, some in gradients.items()
    )


def _scale_gradients(optimizers: Any, factor: float) -> None:
    if gradients := [p.grad for optimizer in optimizers for p in _parameters(optimizer) if p.grad is not None]:
        torch._foreach_mul_(gradients, factor)


def window_open(hooks: Iterable[Hook]) -> bool:
    """True in the middle of an accumulation window; only the loop's own update knows."""
    return any(hook.window_open for hook in hooks if isinstance(hook, Update))


def check_updates(hooks: Iterable[Hook], *, loop_driven: bool) -> None:
    """Raise ConfigurationError if more than one would step.

    Args:
        hooks: those on the bus.
        loop_driven: False where the body of the user's loop makes the updates.
    """
    updates = [hook for hook in hooks if isinstance(hook, Update)]
    if updates and not loop_driven:
        raise ConfigurationError(
            f"{updates[0].label} is on the bus, but in a loop of your own the body makes the update: remove the hook, "
            "or use TrainLoop"
        )
    if len(updates) > 1:
        names = " and ".join(update.label for update in updates)
        raise ConfigurationError(
            f"{names} are both optimizer updates, and each would step; leave one. (TrainLoop adds one to a bus that has "
            "none when the loop is made: add yours before.)"
        )
