"""``CheckInvalidLossHook``: stop a run when its loss becomes NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from trainbus.eventloop import Hook, TrainingError, check_options, mount
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.registry import register
from trainbus.hooks.options import PositiveInt, one_or_more


def _has_outputs(event: AfterTrainIter) -> bool:
    return not event.run.healed  # which has none


@register
class CheckInvalidLossHook(Hook):
    """Raise an error when a loss is NaN or infinite.

    A separate thread checks the values, so the training thread never waits for the device. The run raises the error a few
    iterations later, at its next event. The error names the iteration of the value.

    Args:
        interval: iterations between checks.
        keys: names of the outputs to check; by default all names that contain ``"loss"``.

    Raises:
        TrainingError: during the run, if a value is NaN or infinite, or if there is no output to check.
    """

    @check_options
    def __init__(self, interval: PositiveInt = 50, *, keys: str | Iterable[str] | None = None) -> None:
        advice = "names of outputs, or leave it out to check all losses"
        self.keys = None if keys is None else one_or_more("keys", keys, advice)
        self.interval = interval

    @mount(every=attrgetter("interval"), when=_has_outputs, offload="thread", batch=64)
    def after_train_iter(self, events: list[AfterTrainIter]) -> None:
        for event in events:
            self._check(event)

    def _check(self, event: AfterTrainIter) -> None:
        numbers = {key: value for key, value in event.outputs.items() if isinstance(value, int | float)}
        keys = self.keys or tuple(key for key in numbers if "loss" in key.lower())
        missing = [key for key in keys if key not in numbers]
        if missing or not keys:
            nothing = f"nothing to check under {', '.join(map(repr, missing)) or 'a name with loss in it'}"
            there = f"the scalar outputs are {', '.join(map(repr, numbers)) or 'none'}"
            raise TrainingError(f"{self.label} has {nothing}: {there}. Return them from step(), or name others: keys=")
        broken = ", ".join(f"{key} is {numbers[key]}" for key in keys if not math.isfinite(numbers[key]))
        if broken:
            at = event.progress.iter + 1
            instead = f"lower the learning rate or clip gradients, and continue from a checkpoint before iteration {at}"
            raise TrainingError(f"{broken} at iteration {at} (epoch {event.progress.epoch + 1}), from 1", instead=instead)
