"""The runs of an engine that trains and of one that validates, in the order of trainbus's own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ignite.engine import Engine, State

from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.training_step import outputs_of
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training import Driver, HostedRun
from trainbus.eventloop.training.arguments import Models, Optimizers
from trainbus.eventloop.training.machine import CLOSED, EPOCH, ITERATION, RUN, TRAIN, VAL, Counters, Scope
from trainbus.eventloop.user_errors import add_note, text_of

log = get_logger()

_COUNTS_DIFFER = "the engine and the bus begin at different iterations; load the trainer from the same checkpoint as the bridge"


class TrainerRuns:
    """Drive a run for each ``trainer.run()``, and for each ``evaluator.run()`` outside of it.

    The arguments are those of the bridge, whose ``save`` writes requested checkpoints.
    """

    def __init__(
        self,
        bridge: Any,
        models: Models,
        optimizers: Optimizers | None,
        transform: Callable[[Any], Any] | None,
        work_dir: str | Path | None,
        *,
        validates: bool,
    ) -> None:
        self._bridge = bridge
        self._trainer: Any = bridge.trainer
        self._models, self._optimizers = models, optimizers
        self._transform, self._work_dir, self._validates = transform, work_dir, validates
        self.host: TrainerHost | None = None  # of the last run
        self.driver: Driver | None = None  # while a run is open
        self.last: TrainerHost | None = None  # of the last run that trained
        self.error: BaseException | None = None  # the last error, until Ignite continues
        self.in_run = False
        self._left_off: Scope | None = None  # the scope in which Ignite's run was interrupted
        self._terminated = False

    def run(self, inner: Callable[..., State], *arguments: Any, **named: Any) -> State:
        """Replace ``trainer.run()``."""
        self._terminated = bool(self._trainer.should_terminate)
        self.error, self.in_run = None, True
        try:
            if self._left_off:
                self._continue()
            state = inner(*arguments, **named)
            self._conclude()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.in_run = False
        return state

    def _conclude(self) -> None:
        if self.error is not None:  # a handler of EXCEPTION_RAISED swallowed it
            self.fail(self.error)
        elif self.driver is not None:
            self._end()

    def begin(self) -> None:
        """Begin a run after Ignite's handlers of STARTED, which may load a checkpoint, or in them if they validate."""
        if self.driver is not None:
            return
        engine, host = self._trainer, self.open(self._optimizers)
        self._resume(host)
        drive = host.drive
        host.watch_steps()
        max_epochs, max_iters = _limits(engine.state)
        drive.begin_train(max_epochs=max_epochs, max_iters=max_iters)
        if drive.should_stop():
            engine.terminate()

    def open(self, optimizers: Optimizers | None) -> TrainerHost:
        """Make a run, and publish ``before_run``."""
        host = TrainerHost(".pt", resume_way='Checkpoint.load_objects(bridge.to_save, "{}")')
        run = HostedRun(self._bridge.bus, model=self._models, optimizer=optimizers, work_dir=self._work_dir, host=host)
        run.work_dir_advice = "give attach() work_dir="
        if optimizers is None:
            host.continue_from(None if self.last is None else self.last.run)
        state, self.host, self._bridge.run = self._trainer.state, host, run
        run.validates = None if self._validates else False
        host.train_data, host.epoch_length = state.dataloader, state.epoch_length
        host.drive.begin_run()
        self.driver = host.drive
        return host

    def _resume(self, host: TrainerHost) -> None:
        """Restore the loaded entry, or continue the last run if Ignite does. Ignite's counts take precedence."""
        state, entry, run = self._trainer.state, self._bridge.take_entry(), host.run
        last = None if self.last is None else self.last.run
        self.last = host
        if entry is not None:
            host.restore_entry(entry["entry"], weights=entry["weights"])
            if run.counters.iter != state.iteration:
                log.warning(_COUNTS_DIFFER, id="ignite-counts-differ", bus=run.counters.iter, engine=state.iteration)
        elif last is not None and (self._left_off or last.counters.iter == state.iteration != 0):
            host.continue_from(last)
        elif state.iteration:
            host.resume_without_entry(Counters(update=state.iteration))
        if not self._left_off:
            run.counters.go_to(epoch=state.epoch, batches=run.counters.batches, iteration=state.iteration)

    def _continue(self) -> None:
        """Begin a run in the middle of Ignite's, which was interrupted there and fires no event when it continues."""
        self.begin()
        in_epoch, self._left_off = self._left_off is EPOCH, None
        if in_epoch:
            self.running()[1].begin_epoch()

    def _end(self) -> None:
        """Publish the end of a training, after Ignite's handlers of COMPLETED."""
        host, drive = self.running()
        if self._left_off:
            self._left_off = drive.state.machine.innermost
        self.leave_epoch()
        drive.end_train()
        host.saver.write_due(self._bridge.save)
        self._bridge.wait_for_files()
        drive.end_run()
        self.driver = None

    def fail(self, error: BaseException) -> None:
        """Publish ``on_exception``, and end the run, if it has begun."""
        driver, self.driver, self._left_off = self.driver, None, None
        if driver is None or self._bridge.running is None:
            return
        try:
            self._bridge.wait_for_files()
        except Exception as failure:  # noqa: BLE001 - the first error is the one to raise
            if failure is not error:
                add_note(error, f"and a checkpoint could not be written: {text_of(failure)}")
        driver.fail(error)

    def begin_epoch(self) -> None:
        """Begin an epoch, before Ignite's handlers."""
        if self.driver is None:
            return
        host, drive = self.running()
        self.leave_epoch()
        state, counters = self._trainer.state, drive.state.counters
        # Ignite's handlers may change all of this.
        host.train_data, host.epoch_length = state.dataloader, state.epoch_length
        counters.limit(*_limits(state))
        # An engine that was terminated begins its next epoch with the first batch; else it continues in the epoch.
        batches = 0 if self._terminated or not state.epoch_length else state.iteration % state.epoch_length
        counters.go_to(epoch=state.epoch - 1, batches=batches, iteration=state.iteration)
        self._terminated = False
        drive.begin_epoch()

    def step(self, inner: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        """Replace the training step: one iteration."""
        driver = self.driver
        if driver is None or driver.state.machine.innermost is not EPOCH:
            return inner(engine, batch)
        host: Any = self.host
        self.error = None
        length = host.epoch_length
        driver.begin_iteration(batch, last=length is not None and driver.state.counters.batches + 1 == length)
        output = inner(engine, batch)
        host.window_open = not driver.state.stepped
        driver.end_iteration(outputs_of(output if self._transform is None else self._transform(output)))
        return output

    def save_or_stop_after_iteration(self) -> None:
        """Save and stop after an iteration and Ignite's handlers, which step schedules and run evaluators."""
        if self.driver is None:
            return
        host, drive = self.running()
        if drive.state.stepped:  # perhaps in a handler
            host.window_open = False
        self._save_or_stop()

    def end_epoch(self) -> None:
        """End the epoch, before Ignite's handlers."""
        if self.driver is None:
            return
        self.error = None
        _, drive = self.running()
        machine = drive.state.machine
        if ITERATION in machine:  # a handler of EXCEPTION_RAISED swallowed an exception, and Ignite continues
            drive.abandon_iteration()
        if EPOCH in machine:
            drive.end_epoch()

    def save_or_stop_after_epoch(self) -> None:
        """Save and stop after an epoch and Ignite's handlers."""
        if self.driver is not None:
            self.running()[0].window_open = False  # else a stop would wait for a step of the next epoch
            self._save_or_stop()

    def _save_or_stop(self) -> None:
        host, drive = self.running()
        self.leave_validation()
        host.saver.write_due(self._bridge.save)
        if drive.should_stop():
            self._trainer.terminate()

    def leave_validation(self) -> None:
        """End a validation without its ``after_val``."""
        if self.driver is not None:
            self.driver.drop_evaluation()

    def leave_epoch(self) -> None:
        """End scopes that Ignite left early, without their ``after_x``."""
        if self.driver is not None:
            self.leave_validation()
            if EPOCH in self.driver.state.machine:
                self.driver.abandon_epoch()

    def note_interrupt(self) -> None:
        """Note that ``trainer.interrupt()`` was called."""
        self._left_off = CLOSED

    def running(self) -> tuple[TrainerHost, Driver]:
        """Return the host of the open run, and its driver."""
        assert self.host is not None and self.driver is not None  # noqa: S101 - the callers know
        return self.host, self.driver


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
        if drive.state.machine.innermost in (RUN, TRAIN, EPOCH):
            host.run.validates = True
            host.evaluation_length = self._evaluator.state.epoch_length
            drive.begin_evaluation("val")

    def step(self, inner: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        """Replace the step of the evaluator: one iteration of a validation."""
        driver = self._training.driver
        if driver is None or driver.state.machine.innermost is not VAL:
            return inner(engine, batch)
        driver.begin_evaluation_iteration(batch)
        output = inner(engine, batch)
        driver.end_evaluation_iteration(outputs_of(output))
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
        if driver is None or not driver.state.machine.evaluates:
            return
        if self._complete and driver.state.machine.innermost is VAL:
            driver.end_evaluation(self._evaluator.state.metrics)
        else:
            driver.abandon_evaluation()
        if not self._training.in_run:
            driver.end_run()
            self._training.driver = None


def _limits(state: State) -> tuple[int | None, int | None]:
    """Return the limit that ends the engine's run, in epochs or iterations, because Ignite may set both."""
    epochs, iters, length = state.max_epochs, getattr(state, "max_iters", None), state.epoch_length
    if epochs is None or iters is None:
        return epochs, iters
    return (None, iters) if length is None or iters <= epochs * length else (epochs, None)
