"""The optimizer update: backward, clip and step as a subscriber of ``after_train_iter``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from eventloop.errors import ConfigurationError, TrainingError
from eventloop.events import AfterBackward, AfterTrainIter, BeforeBackward
from eventloop.hook import Hook
from eventloop.priority import Priority, PriorityLike

Precision = Literal["bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Update(Hook):
    """Zeroes gradients, differentiates ``outputs["loss"]``, clips and steps every optimizer of the run.

    ``before_optimizer_step`` and ``after_optimizer_step`` are published around each real step, after clipping.

    Args:
        accumulate: micro-batches per step; each loss is divided by it. A window that an epoch's end cuts short steps with
            its gradients rescaled to the mean over the micro-batches it has.
        grad_clip: largest norm of all gradients together, or the arguments of ``torch.nn.utils.clip_grad_norm_`` as a
            mapping (``{"max_norm": 1.0, "norm_type": 2}``). The norm before clipping is reported as ``grad_norm``.
        amp: ``"bf16"`` or ``"fp16"`` runs the forward pass under ``torch.autocast``; ``"fp16"`` brings a gradient scaler.
        scaler: a ``torch.amp.GradScaler`` to use instead. A step it skips is no update; to know, the scaler reads a flag
            back from the device once a step (its own host sync). Its state is in the checkpoint.

    Raises:
        ConfigurationError: an option out of range.
    """

    name = "training.update"
    priority: PriorityLike = Priority.HIGH

    def __init__(
        self,
        *,
        accumulate: int = 1,
        grad_clip: float | Mapping[str, Any] | None = None,
        amp: Precision | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigurationError(
                f"accumulate={accumulate!r}: give the number of micro-batches per optimizer step, at least 1"
            )
        if amp is not None and amp not in _DTYPES:
            raise ConfigurationError(f'amp={amp!r}: mixed precision is "bf16" or "fp16"')
        self.accumulate = accumulate
        self._clip = _clip_options(grad_clip)
        self._amp: Precision | None = amp
        self._scaler = scaler
        self._count = 0
        self._autocast: torch.autocast | None = None

    @property
    def window_open(self) -> bool:
        """True between the first micro-batch of a window and its step."""
        return self._count > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; windows are never open when a checkpoint is made."""
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the scaler's state back."""
        if "scaler" in state:
            self._scaler = self._scaler or torch.amp.GradScaler()
            self._scaler.load_state_dict(state["scaler"])

    def before_train(self, event: Any) -> None:
        """Make the scaler that fp16 needs, now that the device is known."""
        self._count = 0
        if self._amp == "fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(event.run.device.type)

    def before_forward(self, event: Any) -> None:
        """Enter autocast; left in after_forward, or when the iteration ends by an exception."""
        if self._amp is None:
            return
        self._autocast = torch.autocast(event.run.device.type, dtype=_DTYPES[self._amp])
        self._autocast.__enter__()  # type: ignore[no-untyped-call]  # as are the other two: torch does not annotate them
        event.run.defer(self._leave_autocast)

    def after_forward(self, event: Any) -> None:
        """Leave autocast."""
        self._leave_autocast()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Update the weights."""
        run: Any = event.run
        loss = event.outputs["loss"]
        if not self._count:
            for optimizer in run.optimizers.values():
                optimizer.zero_grad(set_to_none=True)
        self._count += 1
        self._backward(run, loss if self.accumulate == 1 else loss / self.accumulate)
        if self._count == self.accumulate or run.last_batch:
            if self._count < self.accumulate:
                _scale_gradients(run.optimizers.values(), self.accumulate / self._count)
            self._step(run)
            self._count = 0

    def _backward(self, run: Any, loss: torch.Tensor) -> None:
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on any trainable parameter (requires_grad is False); was it made under "
                "torch.no_grad() or detached in step()?"
            )
        run.publish(BeforeBackward, loss=loss)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        run.publish(AfterBackward)

    def _step(self, run: Any) -> None:
        for optimizer in run.optimizers.values():
            if self._scaler is not None:
                self._scaler.unscale_(optimizer)
        if self._clip is not None:
            parameters = [parameter for optimizer in run.optimizers.values() for parameter in _parameters(optimizer)]
            run.report(grad_norm=torch.nn.utils.clip_grad_norm_(parameters, **self._clip))
        for optimizer in run.optimizers.values():
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()

    def _leave_autocast(self) -> None:
        if self._autocast is not None:
            autocast, self._autocast = self._autocast, None
            autocast.__exit__(None, None, None)


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


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _scale_gradients(optimizers: Any, factor: float) -> None:
    gradients = [p.grad for optimizer in optimizers for p in _parameters(optimizer) if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
