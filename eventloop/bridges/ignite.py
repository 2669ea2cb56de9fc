"""The bridge to Ignite: the mount points of a training are those of its ``Engine``, a validation is the run of another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

from ignite.engine import Engine, Events, State
from ignite.handlers.checkpoint import CheckpointEvents

from eventloop import events as ev
from eventloop.bridges import ignite_files
from eventloop.bridges.bridge import Bridge
from eventloop.bridges.hosted import HostedDriver, HostedRun
from eventloop.bridges.training_step import outputs_of, trained_by
from eventloop.bus import Bus, Subscription
from eventloop.checkpoint import AnyPath, unwrapped
from eventloop.checks import check_options
from eventloop.errors import CheckpointError, ConfigurationError, TrainingError
from eventloop.log import get_logger
from eventloop.training import arguments as given
from eventloop.training.state import Counters

log = get_logger()

_COUNTS_DIFFER = "the engine and the bus begin at different iterations: load the trainer from the same checkpoint as the bridge"
_INSIDE = "an Engine calls your training step as a whole; publish an event of your own in it"
_NO_TEST = "an Engine does not know tests; the runs of the attached evaluator are validations"


class IgniteBridge(Bridge):
    """A bus in an ``ignite.engine.Engine``.

        trainer, evaluator = create_supervised_trainer(model, optimizer, loss), create_supervised_evaluator(model, metrics)
        bridge = bus.attach(trainer, evaluator=evaluator, work_dir="runs/digits")

    The model and the optimizer are found in the training step. The bridge has ``state_dict()`` and ``load_state_dict()``: add
    it to the ``to_save`` of Ignite's ``Checkpoint``, and to ``load_objects`` before ``trainer.run()``. Checkpoints that hooks
    request are files of ``Checkpoint``, too, with the objects of :attr:`to_save`; in them the model has the weights that
    hooks put there (``EMAHook``: the averaged ones).

    The bus comes before Ignite's handlers where an iteration or epoch ends, and saves and stops after them.

    Args:
        bus: the bus.
        trainer: the engine that trains.
        model: the model, or several by name; by default those that the training step uses and the optimizers train.
        optimizer: the optimizer, or several by name; by default those that the training step uses.
        evaluator: the engine whose runs are validations. Run it in a handler of the trainer, or alone.
        to_save: objects of requested checkpoints by name, as in ``Checkpoint``; by default model, optimizer, trainer, and the
            schedules and scalers that the training step uses. A resumed run is exact only if all that has state is there.
        output_transform: returns the loss, or outputs by name, from what the training step returned.
        work_dir: directory for the files of hooks.

    Raises:
        ConfigurationError: no model or no optimizer was found.
    """

    host = "an ignite.engine.Engine"
    missing: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("before_forward", "after_forward", "before_backward", "after_backward"), _INSIDE),
        **dict.fromkeys(("before_test", "before_test_epoch", "before_test_iter"), _NO_TEST),
        **dict.fromkeys(("after_test_iter", "after_test_epoch", "after_test"), _NO_TEST),
    }

    @check_options
    def __init__(
        self,
        bus: Bus,
        trainer: Engine,
        *,
        model: given.Models | None = None,
        optimizer: given.Optimizers | None = None,
        evaluator: Engine | None = None,
        to_save: given.Stateful | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        work_dir: str | Path | None = None,
    ) -> None:
        super().__init__(bus, trainer)
        models, self._optimizers, others = trained_by(trainer._process_function, model, optimizer)
        several = isinstance(models, Mapping)
        self._models = {name: unwrapped(one) for name, one in models.items()} if several else unwrapped(models)
        self._evaluator = evaluator
        if evaluator is trainer:
            raise ConfigurationError("evaluator= is the trainer itself: give the engine that validates")
        self.to_save: dict[str, Any] = {
            **(to_save or {"model": self._models, "optimizer": self._optimizers, "trainer": trainer, **others}),
            "bus": self,
        }
        """The objects of requested checkpoints, the bridge included; also what ``Checkpoint.load_objects`` takes."""
        self._transform = output_transform
        self._work_dir = work_dir
        self._driver: HostedDriver | None = None  # while a run is open
        self._training: HostedRun | None = None  # the last one that trained
        self._entry: Mapping[str, Any] | None = None  # to resume from
        self._error: BaseException | None = None  # the last one, until Ignite goes on
        self._left_off = ""  # the scope in which Ignite's run was interrupted
        self._in_run = self._terminated = self._validated = False
        self._since = 0.0  # when Ignite's Checkpoint asked for the state

    def install(self) -> None:
        """Wrap the runs, steps and events of the engines."""
        # Ignite calls handlers in order of registration, and a subscription to EXCEPTION_RAISED swallows exceptions.
        before: dict[Any, Callable[[], None]] = {
            Events.EPOCH_STARTED: self._begin_epoch,
            Events.EPOCH_COMPLETED: self._end_epoch,
            Events.TERMINATE: self._leave_epoch,
        }
        after: dict[Any, Callable[[], None]] = {
            Events.STARTED: self._begin,
            Events.ITERATION_COMPLETED: self._settle_iteration,
            Events.EPOCH_COMPLETED: self._settle_epoch,
            Events.INTERRUPT: self._note_interrupt,
            CheckpointEvents.SAVED_CHECKPOINT: self._tell_saved,
        }
        self._wrap(self.trainer, self._run_training, self._train_on, before, after)
        inner = self.trainer._handle_exception

        def handle_exception(error: BaseException) -> None:
            self._error = error
            inner(error)

        self.replace(self.trainer, "_handle_exception", handle_exception)
        if self._evaluator is not None:
            before = {Events.STARTED: self._begin_validation}
            after = {
                Events.ITERATION_COMPLETED: self._stop_validation,
                Events.EPOCH_COMPLETED: self._note_validated,
                CheckpointEvents.SAVED_CHECKPOINT: self._tell_saved,
            }
            self._wrap(self._evaluator, self._run_evaluator, self._evaluate, before, after)

    def _wrap(
        self,
        engine: Any,
        run: Callable[..., State],
        step: Callable[..., Any],
        before: Mapping[Any, Callable[[], None]],
        after: Mapping[Any, Callable[[], None]],
    ) -> None:
        """Call functions of this bridge around an engine's run, its steps, and the handlers of some events."""
        inner_run, inner_step, inner_fire = engine.run, engine._process_function, engine._fire_event

        @wraps(inner_run)
        def wrapped_run(*arguments: Any, **named: Any) -> State:
            return run(inner_run, *arguments, **named)

        @wraps(inner_step)
        def wrapped_step(engine: Any, batch: Any) -> Any:
            return step(inner_step, engine, batch)

        def fire(event: Any, *arguments: Any, **named: Any) -> None:
            if (call := before.get(event)) is not None:
                call()
            inner_fire(event, *arguments, **named)
            if (call := after.get(event)) is not None:
                call()

        self.replace(engine, "run", wrapped_run)
        self.replace(engine, "_process_function", wrapped_step)
        self.replace(engine, "_fire_event", fire)

    def warn_of_missing(self, subscriptions: Iterable[Subscription]) -> None:
        """Log a warning for each missing mount point that has a subscription, unless that hears validations as well."""
        super().warn_of_missing(one for one in subscriptions if not any("_val" in name for name in one.mount_points))

    # ------------------------------------------------------------------------------------------------------ training

    def _run_training(self, inner: Callable[..., State], *arguments: Any, **named: Any) -> State:
        self._terminated = bool(self.trainer.should_terminate)
        self._error, self._in_run = None, True
        try:
            if self._left_off:
                self._continue()
            state = inner(*arguments, **named)
            self._conclude()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._in_run = False
        return state

    def _conclude(self) -> None:
        if self._error is not None:  # a handler of EXCEPTION_RAISED swallowed it
            self._fail(self._error)
        elif self._driver is not None:
            self._end()

    def _begin(self) -> None:
        """Begin a run after Ignite's handlers of STARTED, which may load a checkpoint, or in them if they validate."""
        if self._driver is not None:
            return
        engine, run = self.trainer, self._open(self._optimizers)
        self._resume(run)
        drive = run.drive()
        drive.watch_steps()
        drive.begin_train(max_epochs=engine.state.max_epochs, max_iters=engine.state.max_iters)
        if drive.should_stop():
            engine.terminate()

    def _open(self, optimizers: given.Optimizers | None) -> HostedRun:
        """Make a run, and publish ``before_run``."""
        run = HostedRun(self.bus, model=self._models, optimizer=optimizers, work_dir=self._work_dir, suffix=".pt")
        state, self.run = self.trainer.state, run
        run.validates = None if self._evaluator is not None else False
        run.train_data, run.epoch_length = state.dataloader, state.epoch_length
        run.drive().begin_run()
        self._driver = run.drive()
        return run

    def _resume(self, run: HostedRun) -> None:
        """Restore what was loaded, or continue the last run, if Ignite does; its counts are the right ones."""
        state, entry, last = self.trainer.state, self._entry, self._training
        self._training, self._entry = run, None
        if entry is not None:
            run.restore_entry(entry["entry"], weights=entry["weights"])
            if run.counters.iter != state.iteration:
                log.warning(_COUNTS_DIFFER, bus=run.counters.iter, engine=state.iteration)
        elif last is not None and (self._left_off or last.counters.iter == state.iteration != 0):
            run.counters.load_state_dict(last.counters.state_dict())
            run.state.resumed = True
        elif state.iteration:
            run.resume_without_entry(Counters(update=state.iteration))
        if not self._left_off:
            run.counters.epoch, run.counters.iter = state.epoch, state.iteration

    def _continue(self) -> None:
        """Begin a run in the middle of Ignite's, which was interrupted there and fires no event when it continues."""
        self._begin()
        in_epoch, self._left_off = self._left_off == "epoch", ""
        if in_epoch:
            self._running()[1].begin_epoch()

    def _end(self) -> None:
        """Publish the end of a training, after Ignite's handlers of COMPLETED."""
        run, drive = self._running()
        if self._left_off:
            self._left_off = run.state.scopes.innermost
        self._leave_epoch()
        drive.end_train()
        run.write_due(self._save)
        self._wait()
        drive.end_run()
        self._driver = None

    def _wait(self) -> None:
        """Wait until all files are durable that `TrainbusSaver` writes, so that the bus hears of them."""
        for saver in ignite_files.savers(self._engines(), self):
            saver.wait()

    def _fail(self, error: BaseException) -> None:
        """Publish ``on_exception``, and end the run, if it has begun."""
        driver, self._driver, self._left_off = self._driver, None, ""
        if driver is not None and self.running is not None:
            driver.fail(error)

    def _begin_epoch(self) -> None:
        if self._driver is None:
            return
        run, drive = self._running()
        self._leave_epoch()
        state, counters = self.trainer.state, run.counters
        run.epoch_length = state.epoch_length
        counters.epoch, counters.iter = state.epoch - 1, state.iteration
        # An engine that was terminated begins its next epoch with the first batch; else it continues in the epoch.
        counters.batches = 0 if self._terminated or not state.epoch_length else state.iteration % state.epoch_length
        self._terminated = False
        drive.begin_epoch()

    def _train_on(self, inner: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        driver = self._driver
        if driver is None or driver.state.scopes.innermost != "epoch":
            return inner(engine, batch)
        run: Any = self.run
        self._error = None
        length = run.epoch_length
        driver.begin_iteration(batch, last=length is not None and run.counters.batches + 1 == length)
        output = inner(engine, batch)
        run.window_open = not run.state.stepped
        driver.end_iteration(outputs_of(output if self._transform is None else self._transform(output)))
        return output

    def _settle_iteration(self) -> None:
        """Save and stop after an iteration and Ignite's handlers, in which schedules step and evaluators run."""
        if self._driver is None:
            return
        run: Any = self.run
        if run.state.stepped:  # perhaps in a handler
            run.window_open = False
        self._settle()

    def _end_epoch(self) -> None:
        if self._driver is None:
            return
        self._error = None
        _, drive = self._running()
        scopes = drive.state.scopes
        if "iter" in scopes:  # a handler of EXCEPTION_RAISED swallowed an exception, and Ignite goes on
            drive.abandon_iteration()
        if "epoch" in scopes:
            drive.end_epoch()

    def _settle_epoch(self) -> None:
        """Save and stop after an epoch and Ignite's handlers."""
        if self._driver is not None:
            self._running()[0].window_open = False  # else a stop would wait for a step of the next epoch
            self._settle()

    def _settle(self) -> None:
        run, drive = self._running()
        self._leave_validation()
        run.write_due(self._save)
        if drive.should_stop():
            self.trainer.terminate()

    def _leave_validation(self) -> None:
        if self._driver is not None and "val" in self._driver.state.scopes:
            self._driver.abandon_validation()

    def _leave_epoch(self) -> None:
        """End scopes that Ignite left early, without their ``after_x``."""
        if self._driver is not None:
            self._leave_validation()
            if "epoch" in self._driver.state.scopes:
                self._driver.abandon_epoch()

    def _note_interrupt(self) -> None:
        self._left_off = "interrupted"

    def _running(self) -> tuple[HostedRun, HostedDriver]:
        assert self.run is not None and self._driver is not None  # noqa: S101 - the callers know
        return self.run, self._driver

    # ---------------------------------------------------------------------------------------------------- validation

    def _run_evaluator(self, inner: Callable[..., State], *arguments: Any, **named: Any) -> State:
        try:
            state = inner(*arguments, **named)
            self._end_validation()
        except BaseException as error:
            if not self._in_run:
                self._fail(error)
            raise
        return state

    def _begin_validation(self) -> None:
        self._validated = False
        if self._in_run:
            self._begin()
        elif self._driver is None:
            self._open(None)
        self._leave_validation()
        run, drive = self._running()
        if drive.state.scopes.innermost in ("run", "train", "epoch"):
            run.validates = True
            run.evaluation_length = None if self._evaluator is None else self._evaluator.state.epoch_length
            drive.begin_validation()

    def _evaluate(self, inner: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        driver = self._driver
        if driver is None or driver.state.scopes.innermost != "val":
            return inner(engine, batch)
        driver.begin_validation_iteration(batch)
        output = inner(engine, batch)
        driver.end_validation_iteration(outputs_of(output))
        return output

    def _stop_validation(self) -> None:
        if self._driver is not None and self._evaluator is not None and self._driver.should_stop():
            self._evaluator.terminate()

    def _note_validated(self) -> None:
        self._validated = True

    def _end_validation(self) -> None:
        """End the validation after all of Ignite's handlers, so that they see and save the averaged weights."""
        driver, evaluator = self._driver, self._evaluator
        if driver is None or evaluator is None or "val" not in driver.state.scopes:
            return
        if self._validated and driver.state.scopes.innermost == "val":
            driver.end_validation(evaluator.state.metrics)
        else:
            driver.abandon_validation()
        if not self._in_run:
            driver.end_run()
            self._driver = None

    # --------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bus, as plain values and tensors by reference, for Ignite's ``Checkpoint``.

        Raises:
            TrainingError: there was no run yet.
            CheckpointValueError: a value is neither a tensor nor a plain value; the error names its path.
        """
        run = self._training or self.run
        if run is None:
            raise TrainingError("the bus has no state before the first trainer.run(): add the bridge to a Checkpoint handler")
        self._since = time.perf_counter()
        for saver in ignite_files.savers(self._engines(), self):
            saver.told = partial(self._told, run)
        entry, weights = run.gather_entry("")
        return {"entry": entry, "weights": weights}

    def _told(self, run: HostedRun, path: Path) -> AbstractContextManager[None]:
        """Return a context that reports the writing of a file by `TrainbusSaver`."""
        self._since = 0.0
        return run.writing(path)

    def _engines(self) -> list[Engine]:
        return [engine for engine in (self.trainer, self._evaluator) if engine is not None]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state; the next ``trainer.run()`` restores it. Load the trainer, the model and the optimizer as well.

        Raises:
            TrainingError: the trainer is running.
            CheckpointError: this is not the state of a bridge.
        """
        if self.running is not None:
            raise TrainingError("bridge.load_state_dict() was called while the trainer runs: call it before trainer.run()")
        if not isinstance(state, Mapping) or not {"entry", "weights"} <= set(state):
            raise CheckpointError("the checkpoint does not hold the state of a bus under the name of the bridge")
        self._entry = state

    def _save(self, path: AnyPath) -> None:
        """Write a requested checkpoint."""
        run, _ = self._running()
        with run.writing(path):
            entry, weights = run.gather_entry(str(path))
            states: dict[int, dict[str, Any]] = {id(self): {"entry": entry, "weights": weights}}
            for name, changed in weights.items():
                states[id(run.models[name])] = {**run.models[name].state_dict(), **changed}
            ignite_files.write(self.trainer, path, self.to_save, states)

    def _tell_saved(self) -> None:
        """Publish ``checkpoint_committed`` for a file that Ignite's own ``Checkpoint`` has saved with the bridge in it."""
        run, since = self.running, self._since
        self._since = 0.0
        if run is None or run.rank or not since:
            return
        if (path := ignite_files.newest(self._engines(), self)) is not None:
            names, seconds = [str(path)], time.perf_counter() - since
            told = ev.CheckpointCommitted(
                progress=run.progress, path=names[0], names=names, bytes=path.stat().st_size, seconds=seconds
            )
            self.bus.publish(told)
