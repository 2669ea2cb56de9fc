"""``LRSweepHook``: find a learning rate by raising it until the loss diverges."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trainbus.eventloop import ConfigurationError, Hook, Priority, TrainingError, check_options, get_logger, mount
from trainbus.eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain, BeforeTrainIter, RunView
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name, PositiveFinite, Share
from trainbus.hooks.schedule import ParamSchedulerHook

log = get_logger()

_FILE = "lr_sweep.json"


@register
class LRSweepHook(Hook):
    """Find a learning rate: raise it exponentially over some iterations, and watch the loss. Also known as LR finder.

    The sweep ends after ``iterations``, or when the smoothed loss diverges. It then stops the run, and weights, buffers and
    optimizer are as before. Give the sweep a run of its own, without a schedule: other hooks do see its iterations.

    The rate of iteration i (from 0) of n is ``start * (end / start) ** (i / (n - 1))``. Groups with other rates keep their
    ratio; the rate is that of the largest. The loss is smoothed by an exponential mean without bias, ``m[i] = beta * m[i - 1] +
    (1 - beta) * loss[i]``, divided by ``1 - beta ** (i + 1)``. The suggestion is the rate at which it falls most steeply over
    the logarithm of the rate, without the first tenth and the last five iterations.

    The idea is the range test of L. N. Smith (Cyclical Learning Rates for Training Neural Networks, 2015, arXiv:1506.01186).
    Growth, smoothing, divergence at four times the best loss, and the steepest slope are those of fastai's ``lr_find``.

    The curve is in ``curve``, in ``lr_sweep.json`` in the work dir, and in the logs and the report as ``sweep_lr`` and
    ``sweep_loss``.

    Args:
        start: first learning rate.
        end: last learning rate.
        iterations: length of the sweep in iterations, at least 20.
        beta: share of the earlier losses in the mean.
        diverges_at: end the sweep when the smoothed loss exceeds its least value by more than this factor.
        optimizer: name of the optimizer to sweep, if there are several.

    Raises:
        ConfigurationError: ``start`` is not less than ``end``, or when training begins: there is a schedule, several optimizers
            without a name, or several processes.
        TrainingError: during the run, if the outputs have no scalar loss.
    """

    priority = Priority.NORMAL

    @check_options
    def __init__(
        self,
        start: PositiveFinite = 1e-7,
        end: PositiveFinite = 10.0,
        iterations: int = 100,
        *,
        beta: Share = 0.98,
        diverges_at: PositiveFinite = 4.0,
        optimizer: Name | None = None,
    ) -> None:
        if not start < end:
            raise ConfigurationError(f"start={start}, end={end}: the sweep goes up; give start= the lower rate")
        if iterations < 20:
            raise ConfigurationError(f"iterations={iterations}: a curve needs at least 20")
        if diverges_at <= 1:
            raise ConfigurationError(f"diverges_at={diverges_at}: give a factor of more than 1")
        self.start = start
        self.end = end
        self.iterations = iterations
        self.beta = beta
        self.diverges_at = diverges_at
        self.optimizer = optimizer
        self.curve: list[tuple[float, float]] = []
        """The learning rate and the smoothed loss of each iteration, until the divergence."""
        self.suggestion: float | None = None
        """The suggested rate; None before the end of the sweep, and if the loss never fell."""
        self._mean = 0.0
        self._ratios: list[float] = []
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._optimizers: dict[str, Any] = {}
        self._over = False

    def files_of_run(self, work_dir: Path) -> Collection[Any]:
        return [work_dir / _FILE]

    def before_train(self, event: BeforeTrain) -> None:
        """Keep weights, buffers and optimizers until the end of the sweep."""
        run = event.run
        self._check(run)
        self.curve, self.suggestion, self._mean, self._over = [], None, 0.0, False
        tensors = [one for model in run.models.values() for one in (*model.parameters(), *model.buffers())]
        self._saved = [(one, one.detach().clone()) for one in tensors]
        self._optimizers = {name: deepcopy(one.state_dict()) for name, one in run.optimizers.items()}
        rates = [float(group["lr"]) for group in self._swept(run).param_groups]
        most = max(rates)
        self._ratios = [rate / most if most else 1.0 for rate in rates]
        run.defer(lambda: self._restore(run))  # for a run that fails

    # Last, so that nothing else sets the rate of the step.
    @mount(priority=Priority.LOWEST)
    def before_train_iter(self, event: BeforeTrainIter) -> None:
        done = min(len(self.curve), self.iterations - 1)
        rate = 0.0 if self._over else self.start * (self.end / self.start) ** (done / (self.iterations - 1))
        for group, ratio in zip(self._swept(event.run).param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def after_train_iter(self, event: AfterTrainIter) -> None:
        if self._over:
            return  # the rest of an accumulation window
        done = len(self.curve)
        loss = _number(event.outputs.get("loss"))
        self._mean = self.beta * self._mean + (1 - self.beta) * loss
        smooth = self._mean / (1 - self.beta ** (done + 1))
        rate = self.start * (self.end / self.start) ** (done / (self.iterations - 1))
        best = min((one for _, one in self.curve), default=smooth)
        diverged = not math.isfinite(smooth) or (done > 0 and smooth > best + (self.diverges_at - 1) * abs(best))
        if not diverged:
            self.curve.append((rate, smooth))
            event.run.report(sweep_lr=rate, sweep_loss=smooth)
        if diverged or len(self.curve) == self.iterations:
            self._over = True
            reason = f"the learning-rate sweep {'diverged' if diverged else 'is done'} at {rate:.2g}"
            event.run.stop(reason, instead=f"begin a new training with the rate that you choose, without {self.label}")

    # First, before the last checkpoint is saved.
    @mount(priority=Priority.HIGHEST)
    def after_train(self, event: AfterTrain) -> None:
        """Put back weights and optimizers, and write the curve."""
        run = event.run
        self._restore(run)
        self.suggestion = steepest(self.curve)
        if self.suggestion is None:
            log.warning(
                "the learning-rate sweep has no suggestion: the loss did not fall",
                id="lr-sweep-without-suggestion",
                iterations=len(self.curve),
            )
        else:
            log.info("learning-rate sweep", suggestion=float(f"{self.suggestion:.3g}"), iterations=len(self.curve))
        if run.work_dir is not None:
            facts = {
                "suggestion": self.suggestion,
                "lr": [lr for lr, _ in self.curve],
                "loss": [loss for _, loss in self.curve],
            }
            (run.work_dir / _FILE).write_text(json.dumps(facts), encoding="utf-8")

    def _check(self, run: RunView) -> None:
        schedules = [one for one in run.bus.hooks if isinstance(one, ParamSchedulerHook) and one.schedulers]
        if schedules or run.foreign.schedulers:
            whose = schedules[0].label if schedules else "the trainer"
            raise ConfigurationError(f"{self.label} sets the learning rate, and so does the schedule of {whose}: leave it out")
        if run.world_size > 1:
            raise ConfigurationError(f"{self.label} compares losses of one process: run the sweep without torchrun")
        if not run.optimizers:
            raise ConfigurationError(f"{self.label} needs an optimizer: give the run optimizer=")
        if self.optimizer not in run.optimizers and not (self.optimizer is None and len(run.optimizers) == 1):
            there = ", ".join(map(repr, run.optimizers))
            raise ConfigurationError(f"{self.label}: optimizer={self.optimizer!r}, but the optimizers are {there}; name one")

    def _swept(self, run: RunView) -> torch.optim.Optimizer:
        return run.optimizers[self.optimizer or next(iter(run.optimizers))]

    def _restore(self, run: RunView) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        with torch.no_grad():
            for one, value in saved:
                one.copy_(value)
        for name, state in self._optimizers.items():
            run.optimizers[name].load_state_dict(state)
        self._optimizers = {}


def steepest(curve: list[tuple[float, float]]) -> float | None:
    """Return the rate at which the loss falls most steeply over the logarithm of the rate; None if it never falls.

    The first tenth of the curve and its last five points do not count.
    """
    points = curve[len(curve) // 10 : max(len(curve) - 5, 0)]
    slopes = [((later - loss) / (math.log(next_) - math.log(rate)), rate) for (rate, loss), (next_, later) in pairwise(points)]
    slope, rate = min(slopes, default=(0.0, None))
    return rate if slope < 0 else None


def _number(loss: Any) -> float:
    try:
        return float(loss.item() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        raise TrainingError(f"LRSweepHook needs a scalar output 'loss', and got {type(loss).__name__}") from None
