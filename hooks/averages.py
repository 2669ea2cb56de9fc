"""Averages of a model's weights over training, each updated by one fused kernel.

``EMAHook`` uses them. They also work without a bus:

    average = ExponentialMovingAverage(model, momentum=0.001)
    for batch in loader:
        ...                                   # forward, backward, optimizer.step()
        average.update_parameters(model)
    average.swap(model)                       # evaluate the averaged weights, then swap again

The formulas are those of ``mmengine.model.averaged_model`` (MMEngine 0.10); ``WarmupEMA`` has TensorFlow's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainbus.eventloop import CheckpointError, TrainingError, check_options, get_logger
from trainbus.eventloop.events import Progress, RunView
from trainbus.eventloop.privates import foreach_copy_, foreach_lerp_
from trainbus.eventloop.registry import register, registrable
from trainbus.eventloop.training import optimizers_of
from trainbus.hooks.options import PositiveInt, Share
from trainbus.hooks.pairs import Pairs, Tensors

log = get_logger()


@registrable("average")
class WeightAverage:
    """Base class of averages. It pairs every floating-point tensor of a model with an averaged tensor of the same shape.

    Tied tensors are averaged once. Integer tensors are not averaged, nor are buffers without ``update_buffers``. The first
    update copies the weights; later, every ``interval``-th update averages. A subclass defines the formula in :meth:`blend`.

    Averages have the dtype of the weights. Rounding loses small steps in bfloat16 and float16, so keep the weights in float32
    (as ``OptimizerHook(amp=...)`` does).

    Args:
        model: the model to average; this object keeps no reference to it.
        interval: number of updates per averaging.
        update_buffers: also average the floating-point buffers in the model's ``state_dict``.
    """

    @check_options
    def __init__(self, model: torch.nn.Module, *, interval: PositiveInt = 1, update_buffers: bool = False) -> None:
        self.interval = interval
        self.update_buffers = update_buffers
        self.steps = 0
        """Number of updates so far. While it is 0, the average equals the weights."""
        self._pairs = Pairs(model, update_buffers, {})

    @property
    def swapped(self) -> bool:
        """True while the model holds the averaged weights and this object holds the raw ones."""
        return True in self._pairs.swapped  # no Python loop: each update reads it

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        """Move ``averages`` towards ``weights`` in place: detached tensors of one device and dtype, in the same order.

        Of sharded tensors, these are the parts of this process.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define blend(averages, weights)")

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The averaged tensors by checkpoint key (the raw ones while swapped). A tied tensor is under each of its keys."""
        return self._pairs.held

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Add the model's present weights to the average.

        Raises:
            TrainingError: the model has the averaged weights at present.
        """
        pairs = self._pairs
        if True in pairs.swapped:
            raise TrainingError("cannot update an average while the model has the averaged weights; swap them back first")
        if pairs.replaced or pairs.moved():
            self._pair_again(model)
        if self.steps % self.interval == 0:
            for averages, weights in self._pairs.groups:
                if self.steps == 0:
                    foreach_copy_(averages, weights)
                else:
                    self.blend(averages, weights)
        self.steps += 1

    def swap(self, model: torch.nn.Module) -> None:
        """Exchange the storage of the model's weights and their averages without a copy. A second call undoes it.

        Sharded weights are copied, one at a time, because ``fully_shard`` keeps references to their storage.
        """
        if self._pairs.replaced:
            self._pair_again(model)
        self._pairs.exchange(not self.swapped)

    def restore(self, model: torch.nn.Module) -> None:
        """Put the raw weights back into the model, also after Ctrl-C has interrupted a swap."""
        self._pairs.finish()
        if self.swapped:
            self.swap(model)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "tensors": dict(self._pairs.held)}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        self.load_tensors(state["tensors"], strict=strict)
        self.steps = int(state["steps"])

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Copy averaged tensors into this average, by checkpoint key; unknown keys are ignored.

        With ``strict`` raise CheckpointError if a tensor is missing or has another shape; else log it.
        """
        held = self._pairs.held
        fitting = [key for key, own in held.items() if key in tensors and tensors[key].shape == own.shape]
        if len(fitting) < len(held):
            lacking = sorted(held.keys() - set(fitting))
            if strict:
                raise CheckpointError(f"the saved average lacks these tensors, or their shapes differ: {', '.join(lacking)}")
            log.warning(
                "the saved average lacks some tensors, or their shapes differ", id="average-incomplete", lacking=lacking
            )
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
    """``average = (1 − momentum) · average + momentum · weight``.

    Args:
        momentum: share of the new weights, between 0 and 1: small, unlike an optimizer's momentum.
    """

    @check_options
    def __init__(
        self, model: torch.nn.Module, *, momentum: Share = 0.0002, interval: PositiveInt = 1, update_buffers: bool = False
    ) -> None:
        super().__init__(model, interval=interval, update_buffers=update_buffers)
        if momentum > 0.5:
            log.warning(
                "momentum is the share of the new weights in an average, and usually small",
                id="momentum-large",
                momentum=momentum,
            )
        self.momentum = float(momentum)

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        foreach_lerp_(averages, weights, self.momentum)


@register
class WarmupEMA(ExponentialMovingAverage):
    """An exponential moving average that forgets the first weights soon, also in a short training.

    Its momentum is ``max(momentum, 9 / (10 + n))`` after ``n`` averagings, so that the decay ``1 - momentum`` is
    ``min(decay, (1 + n) / (10 + n))``. The source is ``num_updates`` of TensorFlow's ``tf.train.ExponentialMovingAverage``.

    Args:
        momentum: share of the new weights in the end, between 0 and 1.
    """

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        foreach_lerp_(averages, weights, max(self.momentum, 9 / (10 + self.steps // self.interval)))


@register
class StochasticWeightAverage(WeightAverage):
    """The running mean of the weights at every ``interval``-th update.

    ``average += (weight − average) / (steps // interval + 1)`` (Izmailov et al., "Averaging Weights Leads to Wider Optima and
    Better Generalization", 2018).
    """

    def blend(self, averages: Tensors, weights: Tensors) -> None:
        foreach_lerp_(averages, weights, 1 / (self.steps // self.interval + 1))


@register
class MomentumAnnealingEMA(ExponentialMovingAverage):
    """An exponential moving average that follows quickly at first and slowly later.

    Its momentum is ``max(momentum, gamma / (gamma + steps))``.

    Args:
        momentum: share of the new weights in the end, between 0 and 1.
        gamma: updates after which the share has fallen to one half.
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
        foreach_lerp_(averages, weights, max(self.momentum, self.gamma / (self.gamma + self.steps)))


class ModelUpdates:
    """The updates of one of a run's models: the steps of the optimizers that hold its parameters.

    Optimizers of one model that step in turn, such as one for matrices and one for the rest, make one update together.

    Args:
        run: the run.
        model: one of its models.
        average: called before the second and each further update of an iteration.
    """

    def __init__(self, run: RunView, model: torch.nn.Module, average: Callable[[Progress], object]) -> None:
        self._run = run
        self._average = average
        self._optimizers = optimizers_of(model, run.optimizers)
        self._averaged: dict[int, int] = {}
        """The steps of each optimizer in an iteration that were averaged before its end."""
        self._iteration = 0
        """That iteration."""
        run.steps.between(self._before_step)

    def end(self, progress: Progress) -> bool:
        """Return True if the iteration that ends has an update that was not averaged yet, or the run has no optimizer."""
        if not self._averaged:  # the usual case
            return not self._optimizers or any(map(self._run.steps.of, self._optimizers))
        return any(self._is_new(one, progress) for one in self._optimizers)

    def _before_step(self, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        if optimizer in self._optimizers and self._is_new(optimizer, progress):
            self._averaged, self._iteration = {id(one): self._run.steps.of(one) for one in self._optimizers}, progress.iter
            self._average(progress)

    def _is_new(self, optimizer: torch.optim.Optimizer, progress: Progress) -> bool:
        """Return True if the optimizer has stepped since the last average."""
        averaged = self._averaged if self._iteration == progress.iter else {}
        return self._run.steps.of(optimizer) > averaged.get(id(optimizer), 0)
