"""The runs of an engine that evaluates: validations, in a training or alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, State

from eventloop.bridges.ignite.training import TrainerRuns
from eventloop.bridges.training_step import outputs_of


class EvaluatorRuns:
    """Publish a validation for each ``evaluator.run()``."""

    def __init__(self, training: TrainerRuns, evaluator: Engine) -> None:
        self._training = training
        self._evaluator: Any = evaluator
        self._complete = False

    def run(self, inner: Callable[..., State], *arguments: Any, **named: Any) -> State:
        """Replace ``evaluator.run()``."""
        try:
            state = inner(*arguments, **named)
            self._end()
        except BaseException as error:
            if not self._training.in_run:
                self._training.fail(error)
            raise
        return state

    def begin(self) -> None:
        """Begin a validation, before Ignite's handlers; outside of ``trainer.run()`` as a separate run."""
        self._complete = False
        if self._training.in_run:
            self._training.begin()
        elif self._training.driver is None:
            self._training.open(None)
        self._training.leave_validation()
        host, drive = self._training.running()
        if drive.state.scopes.innermost in ("run", "train", "epoch"):
            host.run.validates = True
            host.evaluation_length = self._evaluator.state.epoch_length
            drive.begin_validation()

    def step(self, inner: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        """Replace the step of the evaluator: one iteration of a validation."""
        driver = self._training.driver
        if driver is None or driver.state.scopes.innermost != "val":
            return inner(engine, batch)
        driver.begin_validation_iteration(batch)
        output = inner(engine, batch)
        driver.end_validation_iteration(outputs_of(output))
        return output

    def stop_if_asked(self) -> None:
        """End the evaluator early if a hook has stopped the run."""
        if self._training.driver is not None and self._training.driver.should_stop():
            self._evaluator.terminate()

    def note_complete(self) -> None:
        """Note that the evaluator has seen all of its data."""
        self._complete = True

    def _end(self) -> None:
        """End the validation after all of Ignite's handlers, so that they see and save the averaged weights."""
        driver = self._training.driver
        if driver is None or "val" not in driver.state.scopes:
            return
        if self._complete and driver.state.scopes.innermost == "val":
            driver.end_validation(self._evaluator.state.metrics)
        else:
            driver.abandon_validation()
        if not self._training.in_run:
            driver.end_run()
            self._training.driver = None
