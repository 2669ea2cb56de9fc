"""Which checkpoints are the best so far, by one metric or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from eventloop import ConfigurationError, TrainingError
from hooks.retention import Shelf
from hooks.rules import GREATER, LESS, Rule, find_rule, is_better


class Best:
    """The best file by each of some metrics.

    Args:
        metrics: a name or names, ``"auto"`` for the first metric of the first validation, or None.
        rule: ``"greater"`` or ``"less"`` is better for all of them, or one for each; inferred from each name by default.
        greater_keys: names of metrics of which more is better, instead of the usual ones.
        less_keys: names of metrics of which less is better, instead of the usual ones.

    Raises:
        ConfigurationError: names or rules that cannot work, or a name that does not tell whether more is better.
    """

    def __init__(
        self,
        metrics: str | Iterable[str] | None,
        rule: Rule | Sequence[Rule] | None,
        greater_keys: str | Iterable[str] | None,
        less_keys: str | Iterable[str] | None,
    ) -> None:
        self._greater = GREATER if greater_keys is None else names("greater_keys", greater_keys)
        self._less = LESS if less_keys is None else names("less_keys", less_keys)
        self._metrics = None if metrics is None else names("save_best", metrics)
        self._rules = _by_metric(rule, self._metrics or ())
        self._shelves: dict[str, Shelf] = {}
        self._check()

    @property
    def wanted(self) -> bool:
        """Whether there is a metric to go by."""
        return self._metrics is not None

    @property
    def shelves(self) -> list[Shelf]:
        """The files, of each metric."""
        return list(self._shelves.values())

    def improved(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float, Shelf]]:
        """Compare a validation with the best so far: the metrics that are better now, their scores, and where their files go.

        Raises:
            TrainingError: a metric is missing, or is no number.
        """
        if self._metrics == ("auto",):
            self._metrics = (next(iter(metrics)),)
        for metric in self._metrics or ():
            score = _score(metric, metrics)
            shelf = self._shelves.setdefault(metric, Shelf(keep=1))
            best = shelf.newest
            if score is not None and is_better(self._rule_of(metric), score, best.score if best is not None else None):
                yield metric, score, shelf

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the files, the scores, and what ``"auto"`` was."""
        return {"best": {metric: shelf.state_dict() for metric, shelf in self._shelves.items()}, "metrics": self._metrics}

    def load_state_dict(self, state: Mapping[str, Any], exists: Callable[[object], bool]) -> None:
        """Take it back. A best score whose file is gone is forgotten: the next one is the best that there is."""
        if self._metrics == ("auto",) and state["metrics"] is not None:
            self._metrics = tuple(state["metrics"])
        for metric, saved in state["best"].items():
            if self._metrics is not None and metric in self._metrics:
                self._shelves[metric] = Shelf(keep=1)
                self._shelves[metric].load_state_dict(saved, exists)

    def _rule_of(self, metric: str) -> Rule:
        return self._rules.get(metric, self._rules.get("auto")) or find_rule(metric, self._greater, self._less)

    def _check(self) -> None:
        metrics = self._metrics or ()
        if "auto" in metrics and len(metrics) > 1:
            raise ConfigurationError(f'save_best={list(metrics)}: "auto" stands alone, or name the metrics')
        for metric in metrics:
            if metric != "auto":
                self._rule_of(metric)  # says now if it cannot tell


def names(option: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Return a name or names as a tuple, each once.

    Raises:
        ConfigurationError: there are none, or one is empty or no text.
    """
    chosen = (given,) if isinstance(given, str) else tuple(given)
    if not chosen or not all(isinstance(name, str) and name for name in chosen):
        raise ConfigurationError(f"{option}={given!r}: give a name or a list of names")
    return tuple(dict.fromkeys(chosen))


def _by_metric(rule: Rule | Sequence[Rule] | None, metrics: Sequence[str]) -> dict[str, Rule | None]:
    """Return the rule of each metric: the one for all, or the one at the same place of a list."""
    listed = [rule] if rule is None or isinstance(rule, str) else list(rule)
    if not all(one in (None, *get_args(Rule)) for one in listed):
        raise ConfigurationError(f'rule={rule!r}: a rule is "greater" or "less"')
    if len(listed) not in (1, len(metrics)):
        raise ConfigurationError(f"rule={rule!r}: give one rule, or one for each metric of save_best={list(metrics)}")
    return dict(zip(metrics, listed * len(metrics) if len(listed) == 1 else listed, strict=True))


def _score(metric: str, metrics: Mapping[str, Any]) -> float | None:
    if metric not in metrics:
        raise TrainingError(f"save_best={metric!r}, but this validation has only {', '.join(map(repr, metrics))}")
    value = metrics[metric]
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"save_best={metric!r}: its value is a {type(value).__name__}, no single number") from error
