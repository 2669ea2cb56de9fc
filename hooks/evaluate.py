"""``EvaluateHook``: call the user's evaluation function at intervals, and keep the best result."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainbus.eventloop import ConfigurationError, Hook, Priority, TrainingError, check_options, get_logger, mount
from trainbus.eventloop.events import (
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    BeforeTrain,
    BeforeTrainEpoch,
    RunEvent,
    RunView,
)
from trainbus.eventloop.registry import register
from trainbus.eventloop.training import enter_training_mode, in_training_mode, missing_metric
from trainbus.hooks.options import Name, NonNegativeInt, check_epochs
from trainbus.hooks.rules import Rule, find_rule, is_better
from trainbus.hooks.scores import score_of

log = get_logger()


class Evaluated(RunEvent, kw_only=True):
    """The ``metrics`` of an evaluation by ``hook``, after ``epoch`` epochs and ``iter`` iterations.

    Your own hook may publish it, too: ``run.publish(Evaluated, hook=self.label, epoch=..., iter=..., metrics=...)``. Loggers
    write the metrics as ``eval/<name>``.
    """

    hook: str
    epoch: int
    iter: int
    metrics: dict[str, float]
    work_dir: str | None = None


class EvaluationResult(msgspec.Struct, frozen=True):
    """The metrics of an evaluation, and the number of epochs and iterations before it."""

    epoch: int
    iter: int
    metrics: dict[str, float]


@register
class EvaluateHook(Hook):
    """Call ``function()`` every ``interval`` iterations (or epochs), and when training ends or is stopped.

    The function has its own access to model and data. It returns metrics: numbers or tensors with one value, in mappings of
    any depth (``{"coco": {"AP": 0.3}}`` is ``coco/AP``), or None for no result. During the call models are in evaluation mode
    and gradients are off. For validations with averaged weights, progress and best checkpoints, give ``TrainLoop`` ``val_data``
    instead.

    Results go to ``run.info`` (``eval/<name>``), to the event ``evaluated`` that loggers write, and to a file of JSON lines in
    the work dir. The best result is in :attr:`best` and in checkpoints; it is logged at the end of training.

    Args:
        interval: iterations or epochs between calls; 0 calls the function only at the end.
        function: a function without arguments.
        by_epoch: count epochs; False counts iterations.
        monitor: name of the metric that decides which result is best; by default the first metric of the first result.
        rule: ``"greater"`` or ``"less"`` is better; by default inferred from the name, see
            :func:`trainbus.hooks.rules.find_rule`. If that fails, the hook logs a warning and keeps no best result.
        json_file: name of the file in the work dir; None writes no file.
        name: key of this hook in checkpoints, needed if there are several of its kind.

    Raises:
        TrainingError: later: the function did not return a mapping of numbers, or the mapping lacks ``monitor``.
    """

    priority = Priority.LOW

    @check_options
    def __init__(
        self,
        interval: NonNegativeInt,
        function: Callable[[], Mapping[str, Any] | None],
        *,
        by_epoch: bool = False,
        monitor: Name | None = None,
        rule: Rule | None = None,
        json_file: Name | None = "eval_result.json",
        name: str = "",
    ) -> None:
        self.name = name
        self.interval = interval
        self.by_epoch = by_epoch
        self.monitor = monitor
        self.rule = rule or (None if monitor is None else find_rule(monitor))
        self.best: EvaluationResult | None = None
        """The best result so far."""
        self._function = function
        self._json_file = json_file
        self._evaluated_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best": None if self.best is None else msgspec.to_builtins(self.best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best result, unless it is the best by another metric."""
        if self.monitor is None or self.monitor == state["monitor"]:
            self._follow(state["monitor"])
            self.best = None if state["best"] is None else msgspec.convert(state["best"], EvaluationResult)

    def before_train(self, event: BeforeTrain) -> None:
        self._evaluated_at = None
        if event.progress.iter == 0:
            self.best = None

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        if self.by_epoch and self.interval:
            check_epochs(event, f"{self.label}(by_epoch=True)", "Give by_epoch=False, and an interval in iterations")

    def unused(self) -> Collection[str]:
        """Return the mount point that this hook does not count; with ``interval=0``, both."""
        counted = "after_train_epoch" if self.by_epoch else "after_train_iter"
        return {"after_train_iter", "after_train_epoch"} - ({counted} if self.interval else set())

    @mount(every=attrgetter("interval"))
    def after_train_iter(self, event: AfterTrainIter) -> None:
        self._evaluate(event.run, event.progress.epoch + 1, event.progress.iter + 1)

    @mount(every=attrgetter("interval"))
    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        self._evaluate(event.run, event.progress.epoch + 1, event.progress.iter + 1)

    def after_train(self, event: AfterTrain) -> None:
        progress = event.progress
        if self._evaluated_at != progress.iter:
            self._evaluate(event.run, progress.epoch, progress.iter)
        if self.best is not None:
            log.info("best evaluation", hook=self.label, epoch=self.best.epoch, iter=self.best.iter, metrics=self.best.metrics)

    # Offloaded: a slow disk must not delay training, and a full disk must not end it.
    @mount(Evaluated, offload="thread", on_error="log", ranks="rank0", when=attrgetter("work_dir"))
    def write(self, event: Evaluated) -> None:
        if event.hook == self.label and self._json_file is not None and event.work_dir is not None:
            path = Path(event.work_dir) / self._json_file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:  # json, because orjson writes NaN as null
                file.write(json.dumps({"epoch": event.epoch, "iter": event.iter} | event.metrics) + "\n")

    def _evaluate(self, run: RunView, epoch: int, iteration: int) -> None:
        self._evaluated_at = iteration
        modes = [(module, module.training) for model in run.models.values() for module in model.modules()]
        optimizers = [one for one in run.optimizers.values() if in_training_mode(one)]
        for model in run.models.values():
            model.eval()
        try:
            for optimizer in optimizers:
                optimizer.eval()  # type: ignore[attr-defined]  # of schedule-free ones
            with torch.no_grad():
                returned = self._function()
        finally:
            for optimizer in optimizers:
                enter_training_mode(optimizer)
            for module, mode in modes:
                module.training = mode
        if metrics := dict(_flat(self.label, returned or {})):
            self._keep(run, EvaluationResult(epoch, iteration, metrics))

    def _keep(self, run: RunView, result: EvaluationResult) -> None:
        metrics = result.metrics
        run.info.update({f"eval/{name}": value for name, value in metrics.items()})
        if self.monitor is None:
            self._follow(next(iter(metrics)))
        if self.monitor not in metrics:
            raise missing_metric(f"{self.label} follows", str(self.monitor), metrics, what="the function")
        best = None if self.best is None else self.best.metrics[self.monitor]
        if self.rule is not None and is_better(self.rule, metrics[self.monitor], best):
            self.best = result
        work_dir = None if run.work_dir is None else str(run.work_dir)
        run.publish(Evaluated, hook=self.label, epoch=result.epoch, iter=result.iter, metrics=dict(metrics), work_dir=work_dir)

    def _follow(self, monitor: str | None) -> None:
        """Set the metric that decides, and its rule; if the rule cannot be inferred, keep no best result."""
        self.monitor = monitor
        try:
            self.rule = self.rule or (None if monitor is None else find_rule(monitor))
        except ConfigurationError as error:
            log.warning("the best evaluation is not kept", id="best-evaluation-lost", hook=self.label, reason=str(error))


def _flat(label: str, metrics: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    if not isinstance(metrics, Mapping):
        raise TrainingError(f"{label}: the function returned a {type(metrics).__name__}; return a mapping of names to numbers")
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(label, value, f"{name}/")
        else:
            yield name, score_of(f"{label}: the metric {name!r}", value)
