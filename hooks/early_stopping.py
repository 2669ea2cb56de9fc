"""``EarlyStoppingHook``: stop training when a metric no longer improves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from trainbus.eventloop import Hook, Priority, check_options, get_logger
from trainbus.eventloop.events import AfterRun, AfterValEpoch, BeforeTrain, RunView
from trainbus.eventloop.registry import register
from trainbus.eventloop.training import missing_metric
from trainbus.hooks.options import Distance, Finite, Name, PositiveInt
from trainbus.hooks.rules import Rule, find_rule, is_better
from trainbus.hooks.scores import check_validated, value_of, warn_unvalidated

log = get_logger()


@register
class EarlyStoppingHook(Hook):
    """Stop training by one metric of its validations.

    Training ends cleanly when the metric is not finite, is better than ``stopping_threshold``, or has not improved on its best
    value by more than ``min_delta`` in ``patience`` validations in a row.

    The hook runs last (priority 100), so the best checkpoint is requested before the stop. Checkpoints hold the number of
    validations without improvement. A run that is resumed after an early stop therefore ends before its first iteration, unless
    its options (a larger ``patience``) allow more. A training that begins at iteration 0 has no best value.

    Args:
        monitor: name of the metric, as in ``event.metrics``.
        rule: ``"greater"`` or ``"less"`` is better; by default inferred from the name, see
            :func:`trainbus.hooks.rules.find_rule`.
        min_delta: an improvement must be larger than this, in the metric's unit. By default any improvement counts; MMEngine's
            default is 0.1, which suits percentages.
        strict: raise an error if a validation did not return the metric; False logs a warning (MMEngine's default). A value of
            None is skipped, with a warning.
        check_finite: stop at a value that is not finite. False counts NaN as no improvement.
        patience: number of validations without improvement before the stop.
        stopping_threshold: value in the metric's unit beyond which training ends at once.
        name: key of this hook in checkpoints, needed if there are several of its kind.

    Raises:
        ConfigurationError: later: the training has no validations, or the look at their first batches shows one of the below.
        TrainingError: later: the metric is missing (with ``strict``), or its value is not a number.
    """

    priority = Priority.LOWEST
    observes = True

    @check_options
    def __init__(
        self,
        monitor: Name,
        rule: Rule | None = None,
        min_delta: Distance = 0.0,
        strict: bool = True,
        check_finite: bool = True,
        patience: PositiveInt = 5,
        stopping_threshold: Finite | None = None,
        *,
        name: str = "",
    ) -> None:
        self.name = name
        self.monitor = monitor
        self.rule = rule or find_rule(monitor)
        self.min_delta = min_delta
        self.strict = strict
        self.check_finite = check_finite
        self.patience = patience
        self.stopping_threshold = stopping_threshold
        self.best_score: float | None = None
        """The best value so far."""
        self.wait_count = 0
        """Number of validations since the last improvement."""
        self._last_score: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "last_score": self._last_score, "wait_count": self.wait_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_score = state["best_score"]
        self._last_score = state["last_score"]
        self.wait_count = int(state["wait_count"])

    def needs_metrics(self) -> Collection[str]:
        return (self.monitor,) if self.strict else ()

    def before_train(self, event: BeforeTrain) -> None:
        check_validated(event, self.label)
        if event.progress.iter == 0:
            self.best_score, self._last_score, self.wait_count = None, None, 0
        self._stop_if_due(event.run)

    def after_val_epoch(self, event: AfterValEpoch) -> None:
        if not event.run.training:
            return
        watches = f"{self.label} watches"
        if self.monitor not in event.metrics and not self.strict:
            log.warning(str(missing_metric(watches, self.monitor, event.metrics)), id="monitored-metric-missing")
            return
        score, best = value_of(watches, self.monitor, event.metrics), self.best_score
        if score is None:
            return
        needed = None if best is None else best + (self.min_delta if self.rule == "greater" else -self.min_delta)
        self._last_score = score
        if is_better(self.rule, score, needed):
            self.best_score, self.wait_count = score, 0
        else:
            self.wait_count += 1
        self._stop_if_due(event.run)

    def after_run(self, event: AfterRun) -> None:
        warn_unvalidated(event, self.label)

    def _stop_if_due(self, run: RunView) -> None:
        score, threshold, reason, instead = self._last_score, self.stopping_threshold, "", ""
        if score is None:
            return
        if self.check_finite and not isfinite(score):
            reason = f"{self.monitor} is {score}"
            instead = "continue from a checkpoint before that, with a lower learning rate, or give check_finite=False"
        elif threshold is not None and is_better(self.rule, score, threshold):
            reason = f"{self.monitor} is {score:.6g}, beyond stopping_threshold={threshold:g}"
            instead = "the training has reached its goal; for a higher one, give another stopping_threshold or none"
        elif self.wait_count >= self.patience:
            best = "" if self.best_score is None else f" over {self.best_score:.6g}"
            more = f" by more than {self.min_delta:g}" if self.min_delta else ""
            reason = f"{self.monitor} did not improve{more}{best} in {self.wait_count} validations"
            instead = f"take the best checkpoint, or give more than patience={self.patience} and continue"
        if reason:
            log.info("training stops early", reason=reason)
            run.stop(f"{self.label}: {reason}", instead=instead)
