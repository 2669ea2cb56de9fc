"""``OptimizerHook``: the optimizer update as a hook with options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainbus.eventloop import Update, check_options
from trainbus.eventloop.registry import register
from trainbus.hooks.options import PositiveInt


@register
class OptimizerHook(Update):
    """Zero gradients, run the backward pass, clip, and step: the update of a ``TrainLoop``, with options.

    Add it before you make the loop, because ``TrainLoop`` adds an update without options to a bus that has none. In a loop of
    your own the body makes the update, and adding this hook is an error.

    The hook runs in ``after_train_iter`` at priority 30, so handlers with a higher number see the updated weights. It
    publishes ``before_backward``, ``after_backward``, ``before_optimizer_step`` and ``after_optimizer_step``.

    The options are those of :class:`trainbus.eventloop.Update`: ``accumulate``, ``grad_clip``, ``amp`` and ``scaler``.
    """

    name = "OptimizerHook"


@register
class Fp16OptimizerHook(OptimizerHook):
    """Update in fp16 with autocast and a gradient scaler: iMIX's name for ``OptimizerHook(amp="fp16")``.

    Gradients are unscaled and clipped once per real step, also with accumulation (iMIX: in each micro-batch).

    Args:
        grad_clip: maximum norm of all gradients together, or arguments of the clipping, as in
            :class:`trainbus.eventloop.Update`.
        grad_scaler_config: arguments of ``torch.amp.GradScaler``: ``{"init_scale": 1024.0, "growth_interval": 500}``.
        accumulate: micro-batches per step.
    """

    @check_options
    def __init__(
        self,
        grad_clip: float | Mapping[str, Any] | Callable[..., Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        *,
        accumulate: PositiveInt = 1,
    ) -> None:
        super().__init__(accumulate=accumulate, grad_clip=grad_clip, amp="fp16", scaler=grad_scaler_config)
