"""The metrics by which a checkpoint may be the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from eventloop import ConfigurationError, TrainingError
from hooks.options import one_or_more
from hooks.rules import GREATER, LESS, Rule, find_rule, is_better, score_of


class BestMetrics:
    """Metrics, and for each the rule by which one score is better than another.

    Args:
        metrics: a name or names, ``"auto"`` for the first metric of the first validation, or None.
        rule: ``"greater"`` or ``"less"`` is better, for all of them or one for each; by default inferred from each name.
        greater_keys: names of metrics of which more is better, instead of the usual ones.
        less_keys: names of metrics of which less is better, instead of the usual ones.

    Raises:
        ConfigurationError: names or rules that cannot work, or a name from which no rule can be inferred.
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
        """Names; ``("auto",)`` until the first validation."""
        if "auto" in self.names and len(self.names) > 1:
            raise ConfigurationError(f'save_best={list(self.names)}: "auto" stands alone, or name the metrics')
        self._rules = self._by_metric(rule)
        for metric in self.names:
            if metric != "auto":
                self._rule_of(metric)  # raises now if it cannot be inferred

    def reset(self) -> None:
        """Forget which metric ``"auto"`` was."""
        self.names = self._given

    def found(self, names: Iterable[str] | None) -> None:
        """Take the metric that ``"auto"`` was in an earlier run."""
        if self.names == ("auto",) and names:
            self.names = tuple(names)

    def improved(self, metrics: Mapping[str, Any], best: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
        """Yield the metrics of a validation that are better than the ``best`` so far, and their scores.

        Raises:
            TrainingError: a metric is missing, or is not a number.
        """
        self.found([next(iter(metrics))])
        for metric in self.names:
            if metric not in metrics:
                raise TrainingError(f"save_best={metric!r}, but this validation has only {', '.join(map(repr, metrics))}")
            if metrics[metric] is not None:
                score = score_of(f"save_best={metric!r}: its value", metrics[metric])
                if is_better(self._rule_of(metric), score, best.get(metric)):
                    yield metric, score

    def _rule_of(self, metric: str) -> Rule:
        return self._rules.get(metric, self._rules.get("auto")) or find_rule(metric, self._greater, self._less)

    def _by_metric(self, rule: Rule | Sequence[Rule] | None) -> dict[str, Rule | None]:
        """Return the rule of each metric: the one for all, or the one at the same position of a list."""
        rules = [rule] if rule is None or isinstance(rule, str) else list(rule)
        if not all(one in (None, *get_args(Rule)) for one in rules):
            raise ConfigurationError(f'rule={rule!r}: a rule is "greater" or "less"')
        if len(rules) not in (1, len(self.names)):
            raise ConfigurationError(f"rule={rule!r}: give one rule, or one for each metric of save_best={list(self.names)}")
        return dict(zip(self.names, rules * len(self.names) if len(rules) == 1 else rules, strict=True))
