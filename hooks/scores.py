"""Metrics that hooks follow: their values, the best so far, and trainings without a validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, get_args

from trainbus.eventloop import ConfigurationError, TrainingError, get_logger, platform
from trainbus.eventloop.events import AfterRun, AfterTrain, BeforeTrain
from trainbus.eventloop.training import ONE_NUMBER, missing_metric, not_a_number
from trainbus.hooks.options import one_or_more
from trainbus.hooks.rules import GREATER, LESS, Rule, find_rule, is_better

log = get_logger()


class _HasScore(Protocol):
    score: float | None


Scored = TypeVar("Scored", bound=_HasScore)


def score_of(subject: str, value: Any) -> float:
    """Return the value of a metric as a number, or raise TrainingError with a message that begins with ``subject``."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        found = not_a_number(value) or f"a {type(value).__name__}"
        raise TrainingError(f"{subject} is {found}, not a single number. {ONE_NUMBER}") from error


def value_of(subject: str, metric: str, metrics: Mapping[str, Any]) -> float | None:
    """Return the value of a metric that a hook follows; None, with a warning, if the validation computed None.

    This is the rule of all hooks. The messages begin with ``subject``: ``"EarlyStoppingHook watches"``.

    Raises:
        TrainingError: the validation did not return the metric, or its value is not a number.
    """
    if metric not in metrics:
        raise missing_metric(subject, metric, metrics)
    if metrics[metric] is None:
        log.warning(
            f"{subject} the metric {metric!r}, which is None in this validation; the hook skips it", id="metric-is-none"
        )
        return None
    return score_of(f"{subject} the metric {metric!r}, whose value", metrics[metric])


class BestMetrics:
    """Metrics with a best checkpoint, and the rule of each. The arguments are options of ``CheckpointHook``.

    Raises:
        ConfigurationError: a name or rule is invalid, or the rule cannot be inferred from the name.
    """

    def __init__(
        self,
        metrics: str | Iterable[str] | None,
        rule: Rule | Sequence[Rule] | None,
        greater_keys: str | Iterable[str] | None,
        less_keys: str | Iterable[str] | None,
    ) -> None:
        self._greater = GREATER if greater_keys is None else one_or_more("greater_keys", greater_keys)
        self._less = LESS if less_keys is None else one_or_more("less_keys", less_keys)
        self._given = self.names = () if metrics is None else one_or_more("save_best", metrics)
        """Names of the metrics; ``("auto",)`` until the first validation."""
        if "auto" in self.names and len(self.names) > 1:
            raise ConfigurationError(f'save_best={list(self.names)}: give "auto" alone, or only names of metrics')
        if len(self.names) > 1 and len({*map(platform.portable_name, self.names)}) < len(self.names):
            raise ConfigurationError(f"save_best={list(self.names)}: two of them would have one file name; rename a metric")
        rules = [rule] if rule is None or isinstance(rule, str) else list(rule)
        if not all(one in (None, *get_args(Rule)) for one in rules):
            raise ConfigurationError(f'rule={rule!r}: give "greater" or "less", or a list of these')
        if len(rules) not in (1, len(self.names)):
            raise ConfigurationError(f"rule={rule!r}: give one rule, or one for each metric of save_best={list(self.names)}")
        self._rules = dict(zip(self.names, rules * len(self.names), strict=False))
        for metric in self.names:
            if metric != "auto":
                self._rule_of(metric)  # raises now if it cannot be inferred

    def reset(self) -> None:
        self.names = self._given

    def choose(self, names: Iterable[str] | None) -> None:
        """Set the metric chosen by ``"auto"``."""
        if self.names == ("auto",) and names:
            self.names = tuple(names)

    def improved(self, metrics: Mapping[str, Any], best: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
        """Yield name and score of each metric that is better than the score to beat, from ``best``; any is better than None.

        Raises:
            TrainingError: a metric is missing, or is not a number.
        """
        self.choose([name for name, value in metrics.items() if not not_a_number(value)][:1])
        for metric in self.names:
            score = value_of("save_best is", metric, metrics)
            if score is not None and is_better(self._rule_of(metric), score, best.get(metric)):
                yield metric, score

    def ranked(self, metric: str, scored: Iterable[Scored]) -> list[Scored]:
        """Return what has scores, best first; of equal ones, the first one given comes first."""
        return sorted(scored, key=lambda one: one.score or 0.0, reverse=self._rule_of(metric) == "greater")

    def _rule_of(self, metric: str) -> Rule:
        return self._rules.get(metric, self._rules.get("auto")) or find_rule(metric, self._greater, self._less)


def check_validated(event: BeforeTrain, subject: str) -> None:
    """Raise ConfigurationError if the training has no validations; ``subject`` names the hook and its option."""
    if event.run.validates is False:
        advice = "this loop has no data for them: give TrainLoop val_data, or remove the hook (or its option)"
        raise ConfigurationError(f"{subject} needs a metric of validations, but {advice}")


def warn_unvalidated(event: AfterTrain | AfterRun, subject: str) -> None:
    """Warn if a complete training had no validation. In the user's own loop this is known only at the end."""
    done = event.progress
    if event.run.data.train is None:  # nothing was left to train
        return
    if event.run.validates is None and not done.validation and (done.epoch == done.max_epochs or done.iter == done.max_iters):
        log.warning(
            f"{subject} needs a metric of validations, but this training had none; call run.validate(...) in your loop",
            id="no-validation",
        )
