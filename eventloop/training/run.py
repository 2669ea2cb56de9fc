"""``Run``: one run of a training, the object that hooks and your own loop work with."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from trainbus.eventloop.bus import Bus, leader_of
from trainbus.eventloop.bus.routes import TimestampRoute
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError, RunPreempted, RunStopped, TrainingError
from trainbus.eventloop.events import Event, Progress, RunEvent
from trainbus.eventloop.events.event import misfit
from trainbus.eventloop.events.shared import Shared
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.media import MEDIA, without_media
from trainbus.eventloop.training.arguments import (
    Config,
    Data,
    Limit,
    Models,
    OnBus,
    Optimizers,
    Rate,
    Resume,
    Stateful,
    checked_stateful,
    checked_work_dir,
    device_of,
    named,
    no_scalar,
)
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.data import Feeds
from trainbus.eventloop.training.driver import Driver
from trainbus.eventloop.training.facts import carded, described, facts
from trainbus.eventloop.training.host import Accelerator, Host, OwnLoop
from trainbus.eventloop.training.iterators import Epochs, EvaluationBatches, OpenLoops, TrainBatches, TrainIterations
from trainbus.eventloop.training.keep import KEPT, KeptValues
from trainbus.eventloop.training.machine import ITERATIONS, Counters
from trainbus.eventloop.training.metrics import NamedMetrics
from trainbus.eventloop.training.optimizers import options_given, selected, stepping
from trainbus.eventloop.training.parts import Checkpoints, Foreign, LoopCheckpoints, RunData, RunSteps
from trainbus.eventloop.training.replicas import Replicas
from trainbus.eventloop.training.rng import checked_seed
from trainbus.eventloop.training.saves.checkpointer import Checkpointer
from trainbus.eventloop.training.session import DEFAULT_NAME
from trainbus.eventloop.training.state import RunState
from trainbus.eventloop.world import this_rank, world_size

log = get_logger()

_TRAINS: Final = "the trainer's own fit(), train() or run() does this"

# A second loop would take the turns of the trainer, which could not continue.
_INSTEAD: Final = {
    "epochs": _TRAINS,
    "train": _TRAINS,
    "drive": _TRAINS,
    "keep": "give the trainer's own checkpoints the state, or write a hook with state_dict()",
    "validate": "let the trainer validate by its own settings, or evaluate in an EvaluateHook",
    "test": "call the trainer's own test or prediction after the training, or evaluate in an EvaluateHook",
}
"""What to do instead of the methods that only :class:`Run` has."""


class HostedRun:
    """A run by what every run has: its models, counts, hooks and requests, but for the methods of a loop.

        run = HostedRun(bus, model=model, optimizer=optimizer, host=TrainerHost(".pt"))

    Another trainer has the loop of such a run, and a bridge calls its driver. :class:`Run` is that of your own loop.

    Args:
        host: where the run lives (:class:`~trainbus.eventloop.training.Host`).
        **options: as those of :class:`Run`.

    Raises:
        ConfigurationError: an argument does not fit; the error names it.
    """

    _checkpoints_kind: type[Checkpoints] = Checkpoints

    @check_options
    def __init__(
        self,
        bus: OnBus | None = None,
        *,
        model: Models,
        optimizer: Optimizers | None = None,
        work_dir: str | Path | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        stateful: Stateful | None = None,
        name: str | None = None,
        config: Config | None = None,
        counters: Counters | None = None,
        host: Host,
    ) -> None:
        self.bus = bus if bus is not None else Bus()
        self.wants = self.bus.internal.route_of
        """``wants(AfterForward)`` is falsy if publishing the event does nothing; costs as little as a dictionary."""
        self.models = named("model", model, torch.nn.Module)
        self.optimizers = named("optimizer", {} if optimizer is None else optimizer, torch.optim.Optimizer)
        for one in self.optimizers.values():
            stepping(one)  # checks that its steps can be counted
        self.stateful = checked_stateful(stateful or {})
        assigned = (
            None if work_dir is not None else next(filter(None, (one.default_work_dir() for one in self.bus.hooks)), None)
        )
        work_dir = work_dir if assigned is None else assigned
        self.work_dir = None if work_dir is None else checked_work_dir(work_dir)
        self.device = device_of(device, self.models)
        self.seed = None if seed is None else checked_seed(seed)
        self.name = name or (self.work_dir.name if self.work_dir else DEFAULT_NAME)
        self._named = name is not None
        self.config = config or {}
        self.counters = counters or Counters()
        self.counters.rename(self.name)
        self.host = host
        self.state = RunState(self.counters, self.optimizers, self.stateful, self.bus, self.host)
        self.moves_models = device is not None
        self.info: dict[str, Any] = {}
        self.exit_code = 0
        """The exit status that :class:`RunPreempted` asks for at the end of this run; 0 before, and for a run without it."""
        self.shared = Shared()
        self.validates: bool | None = None
        """Whether the training has validations; None before the first one in the user's own loop."""
        self.work_dir_advice = "give the run work_dir="
        """What the user can do if the run has no work dir, for messages."""
        self.kept: KeptValues = KeptValues()
        """What ``run.keep()`` keeps."""
        self.foreign = Foreign()
        self.feeds = Feeds(self.device)
        self.checkpointer = Checkpointer(self)
        self.options = options_given(self.optimizers, seed)
        self.state.save_by(self.checkpointer.save_if_asked)
        self._driver = Driver(self)
        self.checkpoints = self._checkpoints_kind(self, self._driver)
        self.data = RunData(self, self._driver)
        self.steps = RunSteps(self, self._driver)
        self._reported: set[str] = set()  # names of entries that were looked at
        self.host.join(self, self._driver)

    @property
    def model(self) -> torch.nn.Module:
        """The model, or the first of several."""
        return next(iter(self.models.values()))

    @property
    def coordinator(self) -> Coordinator:
        """What the ranks of the run agree by."""
        return self.state.coordinator

    @property
    def progress(self) -> Progress:
        """The counts of the run: the snapshot that events carry."""
        return self.state.progress

    @property
    def healed(self) -> bool:
        """True in an iteration in which this replica group took over the state of another one; it has no outputs."""
        return self.host.replicas is not None and self.host.replicas.healed

    @property
    def rank(self) -> int:
        """Rank of this process; 0 if there is only one."""
        return this_rank()

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return world_size()

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs reported so far in the current iteration."""
        return self.state.outputs

    @property
    def running(self) -> bool:
        """True from the beginning of the run to its end."""
        return self.state.machine.is_open

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training, validations in between included."""
        return self.state.training

    @property
    def updated(self) -> bool:
        """True if an optimizer has stepped in the current iteration."""
        return bool(self.state.stepped)

    @property
    def update_due(self) -> bool:
        """True if the current batch ends an accumulation window of ``run.train(loader, accumulate=)``, or the epoch."""
        return (self.state.counters.batches + 1) % self._driver.accumulate == 0 or self._driver.last_batch

    def report(self, *unnamed: Any, **entries: Any) -> None:
        """Add named entries to the outputs of the current iteration; tensors stay on their device.

            run.report(loss=loss, samples=Image(array), weights=Histogram(tensor), answer=Text(text), curve=Figure(figure))

        Loggers write numbers and tensors of one element. Values of :mod:`trainbus.media` go to the writers that take them, also
        between two iterations; writers prefix their names with the stage. Any other entry is for hooks and metrics; one that no
        metric takes is logged once.

        Between two iterations, entries other than media are lost, which is logged once; see ``EvaluateHook`` for values of an
        epoch.

        Raises:
            TrainingError: an entry has no name, or the run is not open.
            TypeError, ValueError: an image, a histogram, a text or a figure cannot be written.
        """
        if unnamed:
            raise TrainingError("run.report() takes entries by name only, such as run.report(loss=loss)")
        state = self.state
        for value in entries.values():
            if value.__class__ in MEDIA:
                state.check_open("run.report()")
                entries = {**without_media(self, entries)}
                break
        if state.machine.innermost not in ITERATIONS and entries:
            state.check_open("run.report()")
            state.lose(entries)
        if not self._reported.issuperset(entries):
            self._look_at({name: value for name, value in entries.items() if name not in self._reported})
        state.outputs.update(entries)

    def _look_at(self, entries: dict[str, Any]) -> None:
        """Warn of new entries that neither a logger nor a metric can use."""
        self._reported.update(entries)
        for name, value in entries.items():
            if (what := no_scalar(value)) and not self._driver.measures(name):
                log.warning(
                    f"run.report({name}=...) got {what}, which loggers leave out; hooks find it in event.outputs. Report a "
                    f"number, such as a mean, or {name}=Histogram(...) or {name}=Image(...) of trainbus.media",
                    id="reported-value-not-logged",
                    entry=name,
                )

    def publish(self, event: type[Event], **payload: Any) -> None:
        """Make and publish an event of this class, if it has a subscriber. Its fields ``run`` and ``progress`` are filled in.

        Raises:
            TrainingError: ``event`` is not a class derived from ``Event``, or the payload does not fit its fields.
        """
        route = self.wants(event)
        if not route:
            return
        if type(route) is TimestampRoute:
            route()
            return
        kind: Any = event  # unchecked: many users give an event, or its name
        try:
            if isinstance(kind, type) and issubclass(kind, RunEvent):
                made: Event = kind(run=self, progress=self.state.progress, **payload)
            elif isinstance(kind, type) and issubclass(kind, Event):
                ours = {"run": self, "progress": self.state.progress}
                made = kind(**{name: ours[name] for name in ours if name in kind.__struct_fields__}, **payload)
            else:
                name = type(kind).__name__ if isinstance(kind, Event) else "MyEvent"
                raise TrainingError(
                    f"run.publish() takes a class, run.publish({name}, ...), not {kind!r}; bus.publish() an event"
                )
        except TypeError as error:
            if told := misfit(kind, payload):
                raise TrainingError(told) from error
            raise
        state = self.state
        before = state.enter_handlers()
        try:
            self.bus.publish(made)
        finally:
            state.leave_handlers(before)

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost open scope ends, even by an exception; last registered, first called.

        What a hook's method defers is called when the lanes of the hook are empty.
        """
        self.state.machine.defer(self.bus.internal.behind_lanes(undo))

    def stop(self, reason: str = "", *, exit_code: int = 0, instead: str = "") -> None:
        """End the run at the next safe mount point: after an iteration whose accumulation window is complete.

        An epoch or validation that it cuts short does not publish its ``after_x``; ``after_train`` and ``after_run`` follow.
        If ranks differ in validation batches, they end after the validation.

        Args:
            reason: recorded in ``run.info["stop_reason"]`` before ``after_run``.
            exit_code: if not 0, a run of your own loop raises :class:`RunPreempted` when it has ended in order, so that the
                process exits with this status, also if nothing of the run was left. Only on the main thread; in another
                trainer and in ``await loop.arun()`` your program decides.
            instead: what to do instead of resuming the run as it is, if it would then stop again, such as "give more patience".
                The log says it in place of the checkpoint to continue from.
        """
        if reason:
            # Not yet in run.info: a signal handler may interrupt the training thread while that iterates over it. For the same
            # reason nothing in here takes a lock or logs.
            self.state.own.reason = reason
        if instead:  # holds also if the run is stopped for another reason, too
            self.state.own.instead = instead
        if not self.state.own.stop:  # else the run ends for another reason
            self.state.own.exit_code = exit_code
        self.state.own.stop = True

    def cancel(self) -> None:
        """Raise :class:`RunCancelled` on the training thread, also in a publish that waits for room in a full lane.

        Open scopes do not publish their ``after_x``, and nothing is saved.
        """
        self.state.own.cancelled = True

    def pause(self) -> None:
        """Pause the run until :meth:`unpause`; offloaded handlers keep running.

        :meth:`stop`, :meth:`cancel`, the cancellation of ``await loop.arun()`` and Ctrl-C end the pause at once. Only the rank
        that paused a run can end the pause.
        """
        self.state.own.paused = True

    def unpause(self) -> None:
        """Continue a paused run."""
        self.state.own.paused = False

    @check_options
    def set_lr(self, lr: Rate, optimizer: str | int | None = None) -> None:
        """Set the learning rate of all parameter groups.

        ``ParamSchedulerHook`` scales its later rates by the same factor (new rate / old rate). A scheduler that your own code
        steps may overwrite the rate, if it computes rates from its ``base_lrs`` (``LambdaLR``).

        Args:
            lr: a positive, finite number.
            optimizer: name or index of one optimizer; all by default.

        Raises:
            ConfigurationError: ``lr`` is not finite, or the run has no such optimizer.
        """
        if not math.isfinite(lr):
            raise ConfigurationError(f"lr={lr!r}: give a number above 0")
        self.state.own.rates.append((float(lr), selected(self.optimizers, optimizer)))

    def end_epoch(self) -> None:
        """End the epoch after the current iteration, with its ``after_train_epoch``; the next one begins with new batches.

        All ranks must call it, at the same mount point. Inside an accumulation window it waits for the window's step.

        Raises:
            TrainingError: no epoch of ``run.train(loader)`` is open, or it is the one epoch of an iteration-based training.
        """
        if self._driver.epoch_ends is None:
            raise TrainingError(
                "run.end_epoch() needs an epoch of run.train(loader) that can end early: an iteration-based "
                "training is one epoch, and another trainer ends its epochs itself"
            )
        self._driver.epoch_ends = True

    def validate_now(self) -> None:
        """Validate after the current iteration, epoch or validation of a training, even if no validation is due.

        All ranks must call it, at the same mount point. Inside an accumulation window it waits for the window's step.

        Raises:
            TrainingError: the run does not belong to a ``TrainLoop`` with ``val_data``.
        """
        if self.state.plan is None:
            raise TrainingError(
                "run.validate_now() needs the training of a TrainLoop with val_data=: your own loop validates where it calls "
                "run.validate(loader), and another trainer by its own settings"
            )
        self.state.plan.ask()

    def move_to(self, work_dir: Path) -> None:
        """Use another work dir. It comes before the first handler."""
        self.checkpointer.move_to(work_dir)
        self.work_dir = work_dir
        if not self._named:
            self.name = work_dir.name
            self.counters.rename(self.name)
            self.state.set_progress()

    def __repr__(self) -> str:
        return described(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        return carded(f"{type(self).__name__} {self.name}", self._facts(), self.bus)

    def _facts(self) -> dict[str, Any]:
        state = "running" if self.running else "closed"
        return {"state": state, **facts(self.models, self.optimizers, self.counters.snapshot(), self.work_dir)}

    if not TYPE_CHECKING:  # checkers know what a hosted run lacks

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; that of a method of loops tells the way out."""
            if name not in _INSTEAD:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(f"run.{name}() is for your own loop, and here another trainer has the loop: {_INSTEAD[name]}")


class Run(HostedRun):
    """One run of a training, validation or test: a context manager that opens the bus if it is idle.

        with Run(bus, model=model, optimizer=optimizer, work_dir="runs/mine") as run:
            for epoch in run.epochs(20):
                for batch in run.train(loader):
                    ...                              # forward, backward, step: as in any training loop
                    run.report(loss=loss)

    :meth:`stop`, :meth:`cancel`, :meth:`pause`, :meth:`unpause`, :meth:`set_lr` and ``checkpoints.save()`` are safe from any
    thread and from signal handlers. They take effect at the next safe mount point, after the current iteration.

    With several ``torch.distributed`` processes, each has its own run, and the runs stay in step:

    - A wrapper (``DistributedDataParallel``) keeps the model equal on all ranks. Validation metrics cover all ranks.
    - If one rank requests a stop, pause, rate or checkpoint, all ranks act after the same iteration. Rank 0 writes the files.
    - An exception on one rank ends all ranks. A rank waits for another for at most ``init_process_group(timeout=)``. Set a
      timeout longer than anything one rank does alone, such as writing the last checkpoint.

    Args:
        bus: the bus with the hooks; a new one if None.
        model: a module, or several by name.
        optimizer: an optimizer, or several by name. The run counts and publishes every step, wherever it is made.
        work_dir: directory for files; checkpoints need it. If it has a run already, a training that does not resume gets a
            directory of its own: ``first-2`` for ``first``. Its first line of the log names it, and so does ``run.work_dir``.
        device: device for models and batches; None keeps the model where it is and moves batches there.
        seed: seed for Python, numpy and torch, set when the run begins. The model already has its weights by then: call
            ``torch.manual_seed`` before you create it.
        stateful: other objects to save in checkpoints, by name, with ``state_dict`` and ``load_state_dict``.
        resume: path or URL of a checkpoint, or of a directory for its newest good checkpoint. ``"auto"`` goes on
            with the newest run of this name (``first``, ``first-2`` …): it searches its directory and those of the hooks, and
            begins a new run if it finds none.
        strict: False loads only the matching part of a checkpoint of another model or optimizer.
        name: name of the experiment; by default the name of the work dir.
        config: your configuration, for the record (see ``RuntimeInfoHook``).
        counters: counts of an earlier run to continue.
        replicas: the manager of the replica groups that train together (see :mod:`trainbus.bridges`). Each iteration is one
            step of the manager. It needs ``seed=``. A work dir is continued, as by ``resume="auto"``.
        accelerator: the object of a library that prepared model, optimizer and loaders (see :mod:`trainbus.bridges`). Saves and
            stops wait for the step of its ``accumulate()``. Its own checkpoints hold the run as well, and loading one, before
            training begins, continues it; do not skip batches yourself.
        data_mesh: the ``DeviceMesh`` of the processes that train on different batches, such as ``mesh["dp"]``, for a model
            that several processes hold together. By default it is found from ``fully_shard`` or ``DistributedDataParallel``;
            tensor parallelism without them, pipelines and context parallelism need it.
        host: an :class:`~trainbus.eventloop.training.OwnLoop`, in place of ``resume``, ``strict``, ``accelerator``,
            ``replicas`` and ``data_mesh``. A run in another trainer is a :class:`HostedRun`.

    Raises:
        ConfigurationError: an argument does not fit; the error names it.
    """

    host: OwnLoop
    checkpoints: LoopCheckpoints
    _checkpoints_kind = LoopCheckpoints

    @check_options
    def __init__(
        self,
        bus: OnBus | None = None,
        *,
        model: Models,
        optimizer: Optimizers | None = None,
        work_dir: str | Path | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        stateful: Stateful | None = None,
        resume: Resume | None = None,
        strict: bool = True,
        name: str | None = None,
        config: Config | None = None,
        counters: Counters | None = None,
        accelerator: Any = None,
        replicas: Any = None,
        data_mesh: Any = None,
        host: OwnLoop | None = None,
    ) -> None:
        if host is not None and (not strict or any(one is not None for one in (resume, accelerator, replicas, data_mesh))):
            raise ConfigurationError(
                f"host={type(host).__name__} beside resume=, strict=, accelerator=, replicas= or data_mesh=: give these to the "
                "host, which decides"
            )
        if accelerator is not None and replicas is not None:
            raise ConfigurationError(
                "accelerator= and replicas= do not go together: both would average gradients and decide about steps; leave "
                "the accelerator out, and wrap the model as the library of the manager says"
            )
        groups: Replicas | None = None if replicas is None else leader_of("replicas", replicas)
        prepared: Accelerator | None = None if accelerator is None else leader_of("accelerator", accelerator)
        super().__init__(
            bus,
            model=model,
            optimizer=optimizer,
            work_dir=work_dir,
            device=device,
            seed=seed,
            stateful=stateful,
            name=name,
            config=config,
            counters=counters,
            host=host or OwnLoop(resume=resume, strict=strict, accelerator=prepared, replicas=groups, data_mesh=data_mesh),
        )
        if work_dir is None and self.work_dir is not None:  # that of a hook
            self.host.stay()
        if prepared is not None and (mixed := prepared.precision):
            self.foreign.settings = {"precision": mixed}
        self._loops = OpenLoops(self._driver, self)
        elsewhere = next(filter(None, (one.default_checkpoint_dir() for one in self.bus.hooks)), None)
        if elsewhere is not None:
            self.checkpointer.save_to(elsewhere)

    def __enter__(self) -> Self:
        self._driver.begin_run()
        self.defer(self._loops.forget)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not self.state.machine.is_open:
            return False  # the driver already ended it
        cut = isinstance(error, RunStopped)
        if error is not None and not cut:
            self._loops.note(error)
            self._driver.fail(error)
            return False
        try:
            self._loops.leave(cut=cut)
            if not cut and self.state.ran_whole:  # else it may not have come to their use
                self.kept.tell_unused()
        except BaseException as failure:
            self._driver.fail(failure)
            raise
        try:
            self._driver.end_run()
        except RunPreempted as preempted:
            raise preempted from None
        return cut

    def drive(self) -> Driver:
        """Return the driver of this run, for control flow other than a ``for`` statement."""
        self.state.wait_for_calls(waits=True)
        return self._driver

    def keep(self, **values: Any) -> KeptValues:
        """Keep values of your loop in checkpoints; return them as attributes, in a resumed run with their saved states.

            kept = run.keep(best=0.0, generator=generator, envs=envs, buffer=buffer)
            for epoch in run.epochs(20):
                ...
                kept.best = max(kept.best, score)

        Call it before ``run.epochs()``. What each attribute is when a checkpoint is saved comes back: numbers and texts as the
        attribute; tensors, arrays, lists and dicts in place, if their shape is the same; in place, too:

        - generators of random numbers: ``torch.Generator``, NumPy's ``Generator`` and ``RandomState``, ``random.Random``;
        - objects with ``state_dict`` and ``load_state_dict``;
        - environments (``reset``, ``step``, ``action_space``), their wrappers, and vectors of them in this process: the
          attributes that are values, in the middle of an episode, too, and their generators. The log names attributes that are
          no values.

        With several processes, a checkpoint holds the values of rank 0.

        Raises:
            ConfigurationError: a value cannot be kept, or something is kept under its name.
            TrainingError: the run is not open, or its training has begun.
        """
        self.state.check_open("run.keep()")
        if self.state.has_trained:
            raise TrainingError("run.keep() must come before training begins: call it right after `with Run(...) as run:`")
        if self.stateful.setdefault(KEPT, self.kept) is not self.kept:
            raise ConfigurationError(f"stateful={{{KEPT!r}: ...}} has the name of what run.keep() keeps: give it another one")
        kept: KeptValues = self.kept
        kept.add(values)
        if self.world_size > 1 and (own := kept.of_process(values)):
            log.warning(
                "a checkpoint holds what rank 0 keeps, so that a resumed run has its generators and environments on all ranks; "
                "keep what is equal on all ranks",
                id="kept-values-of-rank-0",
                names=own,
            )
        return kept

    @check_options
    def epochs(self, max_epochs: Limit | None = None, *, max_iters: Limit | None = None) -> Epochs:
        """Iterate over the indices of the remaining epochs, between ``before_train`` and ``after_train``.

        Give the total number of epochs or of iterations; iterations are one long epoch (``run.train(loader, endless=True)``).

        Raises:
            ConfigurationError: both limits were given, or none.
        """
        if (max_epochs is None) == (max_iters is None):
            raise ConfigurationError(f"max_epochs={max_epochs} and max_iters={max_iters}: give run.epochs() one of them")
        self.counters.limit(max_epochs, max_iters)
        return Epochs(self._loops)

    @check_options
    def iterations(self, max_iters: Limit, *, accumulate: Limit | None = None) -> TrainIterations:
        """Iterate over the indices of the remaining iterations of a training without a loader, such as steps of an environment.

            for step in run.iterations(100_000):
                ...

        The body is an iteration, as that of :meth:`train`; ``before_train``, one long epoch and ``after_train`` are around
        all of them. ``break`` ends the training: a run that resumes says so, and trains on.

        Args:
            max_iters: the number of iterations of the whole training. A finished one goes on if it is resumed with more.
            accumulate: as that of :meth:`train`.
        """
        self.counters.limit(None, max_iters)
        return TrainIterations(self._loops, accumulate=accumulate)

    @check_options
    def train(self, loader: Data, *, endless: bool = False, accumulate: Limit | None = None) -> TrainBatches:
        """Iterate over the batches of one epoch on the run's device, and publish its events around the loop body.

        An iteration is the whole body, whatever it calls. After ``break``, the next call of the run (a validation, the next
        epoch) ends the iteration, as any other if it has stepped, else without its ``after_train_iter``; and then the epoch.
        The end of a block ``with run.train(loader) as batches:`` does the same. A second loop in the body of ``run.epochs()``
        is a second pass of the same epoch.

        ``len(batches)``, ``batches.dataset`` and ``batches.sampler`` are those of the loader. ``batches.start`` is the number
        of batches of this epoch that were trained before a resume: ``enumerate(batches, start=batches.start)``.

        Args:
            loader: an iterable of batches that can be iterated again.
            endless: restart an exhausted loader within the same epoch (iteration-based training).
            accumulate: batches for one optimizer step. Saves and a stop then wait for the end of such a window; step when
                :attr:`update_due` is True.
        """
        return TrainBatches(self._loops, loader, endless=endless, accumulate=accumulate)

    @check_options
    def validate(self, loader: Data, metrics: NamedMetrics | None = None) -> EvaluationBatches:
        """Iterate over validation batches in evaluation mode without gradients, and publish the events of a validation.

        Reported outputs feed ``metrics``, and scalar ones are averaged; afterwards ``.metrics`` holds the result. Inside
        ``run.train``, a validation is a part of the current iteration.

        ``break`` ends the validation without its ``after_val`` and restores modes, gradients and weights. If you draw batches
        without a ``for`` statement (``next``), use ``with run.validate(loader) as batches:``.
        """
        self.validates = True
        feed = self.feeds.for_evaluation(loader, "val_data")
        return EvaluationBatches(self._loops, feed, self.feeds.metrics(metrics), "val")

    @check_options
    def test(self, loader: Data, metrics: NamedMetrics | None = None) -> EvaluationBatches:
        """Iterate over test batches; like :meth:`validate`, with the events of a test."""
        feed = self.feeds.for_evaluation(loader, "test_data")
        return EvaluationBatches(self._loops, feed, self.feeds.metrics(metrics), "test")
