"""Averages of a model's weights over training, each updated by one fused kernel.

``EMAHook`` uses them; alone they work, too:

    average = ExponentialMovingAverage(model, momentum=0.001)
    for batch in loader:
        ...                                   # forward, backward, optimizer.step()
        average.update_parameters(model)
    average.swap(model)                       # evaluate the averaged weights, then swap again

The formulas are those of MMEngine's ``mmengine.model.averaged_model`` (MMEngine 0.10, docs of ``ExponentialMovingAverage``,
``StochasticWeightAverage`` and ``MomentumAnnealingEMA``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eventloop import CheckpointError, TrainingError, check_options, get_logger, register
from eventloop.config import registrable
from hooks.options import PositiveInt, Share
from hooks.pairs import Pairs, Tensors

log = get_logger()


@registrable("average")
class WeightAverage:
    """Base of the averages: pairs every floating-point tensor of a model with an averaged one of the same shape.

    Tied tensors are averaged once. Tensors of other types, and buffers unless ``update_buffers``, are not averaged: the
    model's own are used. The first update copies the weights; of the later ones every ``interval``-th averages. A subclass
    defines the formula in :meth:`blend`.

    Averages have the type of the weights. In bfloat16 or float16 small steps are lost in rounding: keep the weights in
    float32 (as ``OptimizerHook(amp=...)`` does).

    Args:
        model: whose weights are averaged; it is not kept.
        interval: updates per averaging.
        update_buffers: average floating-point buffers that the model's ``state_dict`` has, too.

    Raises:
        ConfigurationError: an option out of range.
    """

    @check_options
    def __init__(self, model: torch.nn.Module, *, interval: PositiveInt = 1, update_buffers: bool = False) -> None:
        self.interval = interval
        self.update_buffers = update_buffers
        self.steps = 0
        """Updates so far; while it is 0 the average is the weights themselves."""
        self._pairs = Pairs(model, update_buffers, {})

    @property
    def swapped(self) -> bool:
        """True while the model has the averaged weights and this object the raw ones."""
        return True in self._pairs.swapped  # at C speed: each update asks

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        """Move ``averages`` towards ``weights``, in place.

        Args:
            averages: of one device and type; neither they nor the weights require gradients. Of sharded ones, this process's
                part.
            weights: the model's tensors, detached, in the same order.
        """
        raise NotImplementedError(f"{type(self).__name__} must define blend(averages, weights)")

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The averaged tensors (while swapped: the raw ones) by checkpoint key; tied ones under each of their keys."""
        return self._pairs.held

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take the model's present weights into the average."""
        if self.swapped:
            raise TrainingError("an average cannot be updated while the model has the averaged weights; swap them back first")
        if self._pairs.replaced or self._pairs.moved():
            self._pair_again(model)
        if self.steps % self.interval == 0:
            for averages, weights in self._pairs.groups:  # all detached: nothing is recorded for gradients
                if self.steps == 0:
                    torch._foreach_copy_(averages, weights)
                else:
                    self.blend(averages, weights)
        self.steps += 1

    def swap(self, model: torch.nn.Module) -> None:
        """Exchange the storage of the model's weights and the averaged ones; copies nothing. A second call undoes it.

        Sharded weights are copied, one at a time: ``fully_shard`` holds on to their storage.
        """
        if self._pairs.replaced:
            self._pair_again(model)
        self._pairs.exchange(not self.swapped)

    def restore(self, model: torch.nn.Module) -> None:
        """Give the model its own weights back if it has averaged ones, all or some: Ctrl-C may have cut a swap short."""
        self._pairs.finish()
        if self.swapped:
            self.swap(model)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "tensors": dict(self._pairs.held)}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        self.load_tensors(state["tensors"], strict=strict)
        self.steps = int(state["steps"])

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Copy averaged tensors into place.

        Args:
            tensors: by checkpoint key; further ones are ignored.
            strict: False loads the fitting ones and logs the rest.

        Raises:
            CheckpointError: with ``strict``, and some are missing or of another shape.
        """
        held = self._pairs.held
        fitting = [key for key, own in held.items() if key in tensors and tensors[key].shape == own.shape]
        if len(fitting) < len(held):
            lacking = sorted(held.keys() - set(fitting))
            if strict:
                raise CheckpointError(f"the saved average lacks (or has in another shape) {', '.join(lacking)}")
            log.warning("the saved average does not fit in full", lacking=lacking)
        with torch.no_grad():
            for key in fitting:
                held[key].copy_(tensors[key])

    def _pair_again(self, model: torch.nn.Module) -> None:
        self._pairs.finish()
        swapped = self.swapped
        self._pairs = Pairs(model, self.update_buffers, self._pairs.held)
        self._pairs.swapped[:] = [swapped] * len(self._pairs.swapped)


@register
class ExponentialMovingAverage(WeightAverage):
    """``average = (1 − momentum) · average + momentum · weight`` (MMEngine's ``ExponentialMovingAverage``).

    Args:
        model: whose weights are averaged.
        momentum: share of the new weights, between 0 and 1. Small, unlike an optimizer's.
        interval: updates per averaging.
        update_buffers: average floating-point buffers, too.
    """

    @check_options
    def __init__(
        self, model: torch.nn.Module, *, momentum: Share = 0.0002, interval: PositiveInt = 1, update_buffers: bool = False
    ) -> None:
        super().__init__(model, interval=interval, update_buffers=update_buffers)
        if momentum > 0.5:
            log.warning("the momentum of an average is the share of the new weights, usually small", momentum=momentum)
        self.momentum = float(momentum)

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        torch._foreach_lerp_(averages, weights, self.momentum)


@register
class StochasticWeightAverage(WeightAverage):
    """The running mean of the weights at every ``interval``-th update.

    ``average += (weight − average) / (steps // interval + 1)`` (MMEngine's ``StochasticWeightAverage``; Izmailov et al.,
    "Averaging Weights Leads to Wider Optima and Better Generalization", 2018).
    """

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        torch._foreach_lerp_(averages, weights, 1 / (self.steps // self.interval + 1))


@register
class MomentumAnnealingEMA(ExponentialMovingAverage):
    """An exponential moving average that follows quickly at first and slowly later.

    Its momentum is ``max(momentum, gamma / (gamma + steps))`` (MMEngine's ``MomentumAnnealingEMA``).

    Args:
        model: whose weights are averaged.
        momentum: the smallest momentum.
        gamma: updates after which the momentum has fallen to one half.
        interval: updates per averaging.
        update_buffers: average floating-point buffers, too.
    """

    @check_options
    def __init__(
        self,
        model: torch.nn.Module,
        *,
        momentum: Share = 0.0002,
        gamma: PositiveInt = 100,
        interval: PositiveInt = 1,
        update_buffers: bool = False,
    ) -> None:
        super().__init__(model, momentum=momentum, interval=interval, update_buffers=update_buffers)
        self.gamma = gamma

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        momentum = max(self.momentum, self.gamma / (self.gamma + self.steps))
        torch._foreach_lerp_(averages, weights, momentum)
