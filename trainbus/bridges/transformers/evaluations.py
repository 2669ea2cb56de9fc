"""Evaluations of a ``transformers.Trainer``: ``evaluate`` is a validation, ``predict`` is a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from trainbus.bridges.hosted import TrainerHost
from trainbus.eventloop import events as ev
from trainbus.eventloop.training.driver import EvaluationStage

Method = Callable[..., Any]

_PREFIXES: Final[Mapping[EvaluationStage, str]] = {"val": "eval", "test": "test"}
"""The trainer's prefix for the names of metrics."""


class Evaluations:
    """Publish the evaluations of a trainer. A dictionary of data sets is one validation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._host: TrainerHost
        self.stage: EvaluationStage | None = None  # the stage of the present evaluation

    def evaluate(self, host: TrainerHost, stage: EvaluationStage, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Replace ``evaluate`` or ``predict`` of the trainer; return its result."""
        self._host = host
        drive = host.drive
        drive.drop_evaluation()  # a callback has caught the error of the one before
        host.evaluation_length = None
        self.stage = stage
        try:
            drive.begin_evaluation(stage)
            result = original(*args, **kwargs)
            prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else _PREFIXES[stage])
            metrics = result if stage == "val" else (result.metrics or {})
            short = {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items() if name != "epoch"}
            drive.end_evaluation(short)
        finally:
            self.stage = None
        return result

    def prediction_step(self, original: Method, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace ``prediction_step``, one iteration of an evaluation."""
        if self.stage is None:
            return original(model, inputs, *args, **kwargs)
        host, drive = self._host, self._host.drive
        if host.evaluation_length is None and has_length(data := self._trainer.callback_handler.eval_dataloader):
            host.evaluation_length = len(data)
        drive.begin_evaluation_iteration(inputs)
        result = original(model, inputs, *args, **kwargs)
        wanted = host.run.wants(ev.AfterValIter if self.stage == "val" else ev.AfterTestIter)
        named = zip(("loss", "logits", "labels"), result, strict=False) if wanted else ()
        outputs = {name: value for name, value in named if value is not None}
        drive.end_evaluation_iteration(outputs)
        return result


def has_length(data: Any) -> bool:
    """Return True if ``len()`` works: a DataLoader of an iterable dataset only looks as if it did."""
    try:
        return isinstance(data, Sized) and len(data) >= 0
    except TypeError:
        return False
