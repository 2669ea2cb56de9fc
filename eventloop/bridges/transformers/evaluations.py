"""Evaluations of a ``transformers.Trainer``: ``evaluate`` is a validation, ``predict`` is a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from eventloop import events as ev
from eventloop.bridges.hosted import TrainerHost
from eventloop.events import Stage
from eventloop.training import Driver

Method = Callable[..., Any]

_PREFIXES: Final[Mapping[Stage, str]] = {"val": "eval", "test": "test"}  # the trainer's prefix for the names of metrics


class Evaluations:
    """Publish the evaluations of a trainer. A dictionary of data sets is one validation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._host: TrainerHost
        self.stage: Stage | None = None  # the stage of the present evaluation

    def evaluate(self, host: TrainerHost, stage: Stage, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Replace ``evaluate`` or ``predict`` of the trainer; return its result."""
        self._host = host
        drive, val = host.drive, stage == "val"
        abandon_evaluation(drive)
        host.evaluation_length = None
        self.stage = stage
        try:
            (drive.begin_validation if val else drive.begin_test)()
            result = original(*args, **kwargs)
            prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else _PREFIXES[stage])
            metrics = result if val else (result.metrics or {})
            short = {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items() if name != "epoch"}
            (drive.end_validation if val else drive.end_test)(short)
        finally:
            self.stage = None
        return result

    def prediction_step(self, original: Method, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace ``prediction_step``, one iteration of an evaluation."""
        if self.stage is None:
            return original(model, inputs, *args, **kwargs)
        host, drive, val = self._host, self._host.drive, self.stage == "val"
        if host.evaluation_length is None and has_length(data := self._trainer.callback_handler.eval_dataloader):
            host.evaluation_length = len(data)
        (drive.begin_validation_iteration if val else drive.begin_test_iteration)(inputs)
        result = original(model, inputs, *args, **kwargs)
        wanted = host.run.wants(ev.AfterValIter if val else ev.AfterTestIter)
        named = zip(("loss", "logits", "labels"), result, strict=False) if wanted else ()
        outputs = {name: value for name, value in named if value is not None}
        (drive.end_validation_iteration if val else drive.end_test_iteration)(outputs)
        return result


def abandon_evaluation(drive: Driver) -> None:
    """End an evaluation whose error a callback has caught."""
    scopes = drive.state.scopes
    if "val" in scopes:
        drive.abandon_validation()
    elif "test" in scopes:
        drive.abandon_test()


def has_length(data: Any) -> bool:
    """Return True if ``len()`` works: a DataLoader of an iterable dataset only looks as if it did."""
    try:
        return isinstance(data, Sized) and len(data) >= 0
    except TypeError:
        return False
