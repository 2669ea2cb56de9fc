"""Which of two scores is the better one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from eventloop import ConfigurationError

Rule = Literal["greater", "less"]

GREATER = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Metrics of which more is better (MMEngine's list)."""

LESS = ("loss",)
"""Metrics of which less is better (MMEngine's list)."""


def find_rule(metric: str, greater_keys: Iterable[str] = GREATER, less_keys: Iterable[str] = LESS) -> Rule:
    """Return the rule of a metric, from its name in any case.

    In this order: the name is a greater key; it is a less key; a greater key is in it; a less key is in it.

    Raises:
        ConfigurationError: none of these.
    """
    name = metric.lower()
    greater, less = [key.lower() for key in greater_keys], [key.lower() for key in less_keys]
    if name in greater:
        return "greater"
    if name in less:
        return "less"
    if any(key in name for key in greater):
        return "greater"
    if any(key in name for key in less):
        return "less"
    raise ConfigurationError(
        f'metric {metric!r}: is more better, or less? Its name does not tell; say rule="greater" or rule="less" (or, where the '
        "hook has them, name it in greater_keys or less_keys)"
    )


def check_rule(rule: object) -> None:
    """Raise ConfigurationError unless ``rule`` is one, or None."""
    if rule is not None and rule not in get_args(Rule):
        raise ConfigurationError(f'rule={rule!r}: the better score is the "greater" or the "less"; None goes by its name')


def is_better(rule: Rule, score: float, than: float | None) -> bool:
    """Return True if ``score`` is strictly better; NaN never is, and everything else is better than no score at all."""
    if than is None:
        return score == score
    return score > than if rule == "greater" else score < than
