"""Which value of a metric is better, by its name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import contains, eq
from typing import Literal

from trainbus.eventloop import ConfigurationError

Rule = Literal["greater", "less"]

GREATER = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Parts of metrics' names for which more is better (MMEngine's list)."""

LESS = ("loss",)
"""Parts of metrics' names for which less is better (MMEngine's list)."""


def find_rule(metric: str, greater_keys: Iterable[str] = GREATER, less_keys: Iterable[str] = LESS) -> Rule:
    """Infer the rule of a metric from its name, ignoring case. A key that equals the name wins over keys within the name.

    Raises:
        ConfigurationError: the name contains no key, or keys of both kinds.
    """
    for matches in (eq, contains):
        greater = next((key for key in greater_keys if matches(metric.lower(), key.lower())), None)
        less = next((key for key in less_keys if matches(metric.lower(), key.lower())), None)
        if greater and less:
            both = f"{greater!r} (more is better) and {less!r} (less is better)"
            raise ConfigurationError(f'metric {metric!r}: its name contains {both}; give rule="greater" or rule="less"')
        if greater or less:
            return "greater" if greater else "less"
    advice = 'give rule="greater" or rule="less"'
    raise ConfigurationError(f"metric {metric!r}: its name does not imply whether more or less is better; {advice}")


def is_better(rule: Rule, score: float, than: float | None) -> bool:
    """Return True if ``score`` is strictly better. NaN is never better; any other score is better than None."""
    if than is None:
        return score == score
    return score > than if rule == "greater" else score < than
