"""Which of two scores is the better one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from eventloop import ConfigurationError

Rule = Literal["greater", "less"]

GREATER = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Metrics of which more is better (MMEngine's list)."""

LESS = ("loss",)
"""Metrics of which less is better (MMEngine's list)."""


def find_rule(metric: str, greater_keys: Iterable[str] = GREATER, less_keys: Iterable[str] = LESS) -> Rule:
    """Return the rule of a metric, from its name in any case.

    A key that is the whole name counts before keys that are in it.

    Raises:
        ConfigurationError: no key is in the name, or keys of both kinds are.
    """
    name = metric.lower()
    greater, less = [key for key in greater_keys if key.lower() in name], [key for key in less_keys if key.lower() in name]
    whole = {rule for rule, keys in (("greater", greater), ("less", less)) if name in map(str.lower, keys)}
    if len(whole) == 1:
        return "greater" if "greater" in whole else "less"
    if greater and less:
        raise ConfigurationError(
            f"metric {metric!r}: its name has {greater[0]!r}, of which more is better, and {less[0]!r}, of which less is; say "
            'rule="greater" or rule="less"'
        )
    if greater or less:
        return "greater" if greater else "less"
    raise ConfigurationError(
        f'metric {metric!r}: is more better, or less? Its name does not tell; say rule="greater" or rule="less" (or, where the '
        "hook has them, name it in greater_keys or less_keys)"
    )


def is_better(rule: Rule, score: float, than: float | None) -> bool:
    """Return True if ``score`` is strictly better; NaN never is, and everything else is better than no score at all."""
    if than is None:
        return score == score
    return score > than if rule == "greater" else score < than
