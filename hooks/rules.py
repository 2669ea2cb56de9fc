"""Metrics that hooks go by: which of two scores is better, and trainings without a validation that gives one."""

from __future__ import annotations

from collections.abc import Iterable
from operator import contains, eq
from typing import Any, Literal

from eventloop import ConfigurationError, TrainingError, get_logger
from eventloop.events import AfterRun, AfterTrain, BeforeTrain

log = get_logger()

Rule = Literal["greater", "less"]

GREATER = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Metrics of which more is better (MMEngine's list)."""

LESS = ("loss",)
"""Metrics of which less is better (MMEngine's list)."""


def find_rule(metric: str, greater_keys: Iterable[str] = GREATER, less_keys: Iterable[str] = LESS) -> Rule:
    """Return the rule of a metric, from its name in any case. A key that equals the name counts before keys within it.

    Raises:
        ConfigurationError: the name contains no key, or keys of both kinds.
    """
    for matches in (eq, contains):
        greater = next((key for key in greater_keys if matches(metric.lower(), key.lower())), None)
        less = next((key for key in less_keys if matches(metric.lower(), key.lower())), None)
        if greater and less:
            raise ConfigurationError(
                f"metric {metric!r}: its name has {greater!r}, of which more is better, and {less!r}, of which less is; say "
                'rule="greater" or rule="less"'
            )
        if greater or less:
            return "greater" if greater else "less"
    raise ConfigurationError(
        f'metric {metric!r}: is more better, or less? Its name does not tell; say rule="greater" or rule="less" (or, where the '
        "hook has them, name it in greater_keys or less_keys)"
    )


def is_better(rule: Rule, score: float, than: float | None) -> bool:
    """Return True if ``score`` is strictly better. NaN never is; any other score is better than None."""
    if than is None:
        return score == score
    return score > than if rule == "greater" else score < than


def score_of(what: str, value: Any) -> float:
    """Return the value of a metric as a number.

    Raises:
        TrainingError: it is not a single number; the message begins with ``what``.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{what} is a {type(value).__name__}, not a single number") from error


def check_validated(event: BeforeTrain, what: str) -> None:
    """Raise ConfigurationError if the training that begins has no validation; ``what`` is the hook, with its option."""
    if event.run.validates is False:
        raise ConfigurationError(
            f"{what} goes by a metric of validations, but this loop has no data for them: give TrainLoop val_data, or leave "
            "the hook (or its option) out"
        )


def warn_unvalidated(event: AfterTrain | AfterRun, what: str) -> None:
    """Warn if a complete training had no validation: in a loop of the user's own this is known only at the end."""
    done = event.progress
    if event.run.validates is None and (done.epoch == done.max_epochs or done.iter == done.max_iters):
        log.warning(f"{what} goes by a metric of validations, but this training had none: call run.validate(...) in your loop")
