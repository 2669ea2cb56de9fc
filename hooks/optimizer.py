"""``OptimizerHook``: the optimizer update as a hook with options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventloop import Update, check_options, register
from hooks.options import PositiveInt


@register
class OptimizerHook(Update):
    """Zero gradients, run the backward pass, clip, and step: the update of a ``TrainLoop``, with options.

    Add it before you make the loop, because ``TrainLoop`` adds an update without options to a bus that has none. In a loop of
    your own the body makes the update, and adding this hook is an error.

    The hook runs in ``after_train_iter`` at priority 30, so handlers with a higher number see the updated weights. It
    publishes ``before_backward``, ``after_backward``, ``before_optimizer_step`` and ``after_optimizer_step``.

    Args (see :class:`eventloop.Update`):
        accumulate: micro-batches per step (iMIX: accumulation).
        grad_clip: largest norm of all gradients together, or the arguments of ``torch.nn.utils.clip_grad_norm_``, such as
            ``{"max_norm": 35, "norm_type": 2}``. Gradients are clipped once per real step, after unscaling.
        amp: ``"bf16"`` or ``"fp16"``.
        scaler: your own ``torch.amp.GradScaler`` for fp16, or a mapping of its arguments.

    Raises:
        ConfigurationError: an option is out of range.
    """

    name = "OptimizerHook"


@register
class Fp16OptimizerHook(OptimizerHook):
    """Update in fp16 with autocast and a gradient scaler: iMIX's name for ``OptimizerHook(amp="fp16")``.

    Gradients are unscaled and clipped once per real step, also with accumulation (iMIX: in each micro-batch).

    Args:
        grad_clip: as in :class:`OptimizerHook`.
        grad_scaler_config: arguments of ``torch.amp.GradScaler``: ``{"init_scale": 1024.0, "growth_interval": 500}``.
        accumulate: micro-batches per step.

    Raises:
        ConfigurationError: an option is out of range.
    """

    @check_options
    def __init__(
        self,
        grad_clip: float | Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        *,
        accumulate: PositiveInt = 1,
    ) -> None:
        super().__init__(accumulate=accumulate, grad_clip=grad_clip, amp="fp16", scaler=grad_scaler_config)
