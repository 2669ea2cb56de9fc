"""The bridge to Ignite: one ``Engine`` publishes the mount points of a training, and another one publishes validations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

from ignite.engine import Engine, Events, State
from ignite.handlers.checkpoint import CheckpointEvents

from trainbus.bridges.bridge import Bridge
from trainbus.bridges.foreign_calls import ignite_handlers
from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.ignite import files as ignite_files
from trainbus.bridges.ignite import privates
from trainbus.bridges.ignite.training import EvaluatorRuns, TrainerRuns
from trainbus.bridges.saves import ReopenedSaver, Writing, write_pickled
from trainbus.bridges.training_step import trained_by
from trainbus.eventloop.bus import Bus, Subscription
from trainbus.eventloop.checkpoint import AnyPath, make_directory, unwrapped
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import CheckpointError, ConfigurationError, TrainingError
from trainbus.eventloop.privates import metadata_of, with_metadata
from trainbus.eventloop.training.arguments import Models, Optimizers, Stateful
from trainbus.eventloop.training.saves.requests import SaveOutcome

_INSIDE = "an Engine calls your training step as a whole; publish your own event in it"
_NO_TEST = "an Engine has no tests; the runs of the attached evaluator are validations"


class IgniteBridge(Bridge):
    """A bus in an ``ignite.engine.Engine``.

        trainer, evaluator = create_supervised_trainer(model, optimizer, loss), create_supervised_evaluator(model, metrics)
        bridge = attach(bus, trainer, evaluator=evaluator, work_dir="runs/digits")

    The model and the optimizer are found in the training step. The bridge has ``state_dict()`` and ``load_state_dict()``: add
    it to the ``to_save`` of Ignite's ``Checkpoint``, and to ``load_objects`` before ``trainer.run()``. Checkpoints that hooks
    request are files of ``Checkpoint``, too, with the objects of :attr:`to_save`. The model's weights in them may be replaced
    by hooks (``EMAHook``: by the averaged ones).

    At the end of an iteration or epoch, the bus publishes before Ignite's handlers, and saves and stops after them.

    Args:
        bus: the bus.
        trainer: the engine that trains.
        model: the model, or several by name; by default the models that the training step uses and the optimizers train.
        optimizer: the optimizer, or several by name; by default the optimizers that the training step uses.
        evaluator: the engine whose runs are validations. Run it in a handler of the trainer, or alone.
        to_save: objects of requested checkpoints by name, as in ``Checkpoint``; by default model, optimizer, trainer, and the
            schedules and scalers that the training step uses. A resumed run is exact only if all that has state is there.
        output_transform: returns the loss, or outputs by name, from what the training step returned.
        work_dir: directory for the files of hooks.

    Raises:
        ConfigurationError: no model or no optimizer was found.
    """

    host, trains = "an ignite.engine.Engine", "run"
    instead: ClassVar[Mapping[str, str]] = {
        "checkpoints": "write TrainbusSaver(folder, trainer) in the place of DiskSaver, which needs no bus"
    }
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
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        evaluator: Engine | None = None,
        to_save: Stateful | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        work_dir: str | Path | None = None,
    ) -> None:
        privates.check(trainer)
        super().__init__(bus, trainer)
        models, self._optimizers, others = trained_by(getattr(trainer, privates.STEP), model, optimizer)
        several = isinstance(models, Mapping)
        self._models = {name: unwrapped(one) for name, one in models.items()} if several else unwrapped(models)
        self._evaluator = evaluator
        if evaluator is trainer:
            raise ConfigurationError("evaluator= is the trainer itself; give the engine that validates")
        self.to_save: dict[str, Any] = {
            **(to_save or {"model": self._models, "optimizer": self._optimizers, "trainer": trainer, **others}),
            "bus": self,
        }
        """The objects of requested checkpoints, the bridge included; also what ``Checkpoint.load_objects`` takes."""
        self._training = TrainerRuns(
            self, self._models, self._optimizers, output_transform, work_dir, validates=evaluator is not None
        )
        self._saver = ReopenedSaver()  # of requested checkpoints
        self._entry: Mapping[str, Any] | None = None  # to resume from
        self._since = 0.0  # when Ignite's Checkpoint asked for the state

    def install(self) -> None:
        """Wrap the runs, steps and events of the engines."""
        training = self._training
        # Ignite calls handlers in order of registration, and a subscription to EXCEPTION_RAISED swallows exceptions.
        before: dict[Any, Callable[[], None]] = {
            Events.EPOCH_STARTED: training.begin_epoch,
            Events.EPOCH_COMPLETED: training.end_epoch,
            Events.TERMINATE: training.leave_epoch,
        }
        after: dict[Any, Callable[[], None]] = {
            Events.STARTED: training.begin,
            Events.ITERATION_COMPLETED: training.save_or_stop_after_iteration,
            Events.EPOCH_COMPLETED: training.save_or_stop_after_epoch,
            Events.INTERRUPT: training.note_interrupt,
            CheckpointEvents.SAVED_CHECKPOINT: self._publish_saved,
        }
        self._wrap(self.trainer, training.run, training.step, before, after)
        inner = getattr(self.trainer, privates.HANDLE_EXCEPTION)

        def handle_exception(error: BaseException) -> None:
            training.error = error
            inner(error)

        self.replace(self.trainer, privates.HANDLE_EXCEPTION, handle_exception)
        if self._evaluator is not None:
            validation = EvaluatorRuns(training, self._evaluator)
            before = {Events.STARTED: validation.begin}
            after = {
                Events.ITERATION_COMPLETED: validation.stop_if_asked,
                Events.EPOCH_COMPLETED: validation.note_complete,
                CheckpointEvents.SAVED_CHECKPOINT: self._publish_saved,
            }
            self._wrap(self._evaluator, validation.run, validation.step, before, after)

    def _wrap(
        self,
        engine: Any,
        run: Callable[..., State],
        step: Callable[..., Any],
        before: Mapping[Any, Callable[[], None]],
        after: Mapping[Any, Callable[[], None]],
    ) -> None:
        """Call functions of this bridge around an engine's run, its steps, and the handlers of some events."""
        inner_run, inner_step, inner_fire = engine.run, getattr(engine, privates.STEP), getattr(engine, privates.FIRE)
        handlers = inner_fire

        @wraps(inner_run)
        def wrapped_run(*arguments: Any, **named: Any) -> State:
            nonlocal handlers
            handlers = ignite_handlers(engine, self.bus, inner_fire)
            return run(inner_run, *arguments, **named)

        @wraps(inner_step)
        def wrapped_step(engine: Any, batch: Any) -> Any:
            return step(inner_step, engine, batch)

        def fire(event: Any, *arguments: Any, **named: Any) -> None:
            if (call := before.get(event)) is not None:
                call()
            handlers(event, *arguments, **named)
            if (call := after.get(event)) is not None:
                call()

        self.replace(engine, "run", wrapped_run)
        self.replace(engine, privates.STEP, wrapped_step)
        self.replace(engine, privates.FIRE, fire)

    def warn_of_missing(self, subscriptions: Iterable[Subscription]) -> None:
        """Log a warning for each missing mount point that has a subscription, unless that hears validations as well."""
        super().warn_of_missing(one for one in subscriptions if not any("_val" in name for name in one.mount_points))

    # --------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bus, as plain values and tensors by reference, for Ignite's ``Checkpoint``.

        Raises:
            TrainingError: there was no run yet.
            CheckpointValueError: a value is neither a tensor nor a plain value; the error names its path.
        """
        host = self._training.last or self._training.host
        if host is None:
            raise TrainingError("the bus has no state before the first trainer.run(): add the bridge to a Checkpoint handler")
        self._since = time.perf_counter()
        for saver in ignite_files.savers(self._engines(), self):
            saver.report = partial(self._report, host)
        entry, weights = host.gather_entry("")
        return {"entry": entry, "weights": weights}

    def _report(self, host: TrainerHost, path: Path) -> Writing:
        """Return a context that reports the writing of a file by `TrainbusSaver`."""
        self._since = 0.0
        return host.saver.writing(path)

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

    def take_entry(self) -> Mapping[str, Any] | None:
        """Return and forget the entry that was loaded since the last run."""
        entry, self._entry = self._entry, None
        return entry

    def save(self, path: AnyPath) -> None:
        """Copy the state for a requested checkpoint, and queue the copy to be written."""
        host, _ = self._training.running()
        writing = host.saver.writing(path)
        try:
            with writing.copying():
                self._copy(host, path, writing)
        except Exception:
            with writing:
                raise

    def _copy(self, host: TrainerHost, path: AnyPath, writing: Writing) -> None:
        entry, weights = host.gather_entry(str(path))
        states: dict[int, Mapping[str, Any]] = {id(self): {"entry": entry, "weights": weights}}
        for name, changed in weights.items():
            state = host.run.models[name].state_dict()
            states[id(host.run.models[name])] = with_metadata({**state, **changed}, metadata_of(state))
        objects = ignite_files.with_states(self.to_save, states)
        if not isinstance(path, Path):
            raise ConfigurationError(f"{path}: Ignite writes requested checkpoints to local directories only")
        if (pickled := ignite_files.pickled_states(self.trainer, objects)) is not None:
            make_directory(path.parent)
            self._saver.save(pickled.storages, path, partial(write_pickled, pickled, writing), raises=host.saver.raises)

    def wait_for_files(self) -> None:
        """Wait until all files are durable and reported on the bus; raise the CheckpointError of a failed one."""
        self._saver.close()
        for saver in ignite_files.savers(self._engines(), self):
            saver.wait()

    def _publish_saved(self) -> None:
        """Publish ``checkpoint_committed`` for a file that Ignite's own ``Checkpoint`` has saved with the bridge in it."""
        run, since = self.running, self._since
        self._since = 0.0
        if run is None or run.rank or not since:
            return
        if (path := ignite_files.newest(self._engines(), self)) is not None:
            seconds = time.perf_counter() - since
            outcome = SaveOutcome(self.bus, [path], run.counters.snapshot())
            outcome.committed(size=path.stat().st_size, seconds=seconds, stall=seconds)
