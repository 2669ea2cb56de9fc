"""``Run``: the interface of a run for its hooks and its user.

    with Run(bus, model=model, optimizer=optimizer, work_dir="runs/mine") as run:
        for epoch in run.epochs(20):
            for batch in run.train(loader):
                ...                                  # forward, backward, step: as in any training loop
                run.report(loss=loss)

publishes the same events around the user's own body that ``TrainLoop`` publishes around its own. Their order is in
:mod:`eventloop.training.driver`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch

from eventloop import events as ev
from eventloop.bus import Bus
from eventloop.checkpoint import AnyPath, Busy, Staging, as_path, unwrapped
from eventloop.checks import check_options
from eventloop.errors import ConfigurationError, TrainingError
from eventloop.events import Event, Progress, RunEvent
from eventloop.events.shared import Shared
from eventloop.training.arguments import (
    Config,
    Data,
    Limit,
    Models,
    OnBus,
    Optimizers,
    Rate,
    Resume,
    Stateful,
    check_image,
    checked_stateful,
    checked_work_dir,
    device_of,
    named,
)
from eventloop.training.data import Feeds
from eventloop.training.distributed.ranks import this_rank, world_size
from eventloop.training.driver import Driver
from eventloop.training.iterators import Bodies, Epochs, EvaluationBatches, TrainBatches
from eventloop.training.metrics import NamedMetrics
from eventloop.training.optimizers import by_path, options_given, stepping
from eventloop.training.rng import checked_seed
from eventloop.training.saves.capture import Saves
from eventloop.training.saves.request import OnError, SaveRequest
from eventloop.training.saves.restore import HOSTED, Restore
from eventloop.training.session import Session
from eventloop.training.state import Counters, RunState
from eventloop.training.update import window_open


class Run:
    """One run of a training, validation or test. A context manager; opens the bus if it is not open.

    Where ``torch.distributed`` is initialised with several processes, each has its own run, and the runs go in step:

    - A wrapper (``DistributedDataParallel``) keeps the model the same on all ranks; validation metrics cover all ranks.
    - A stop, pause or checkpoint that one rank asks for is made by all after the same iteration; rank 0 writes the files.
    - An exception on one rank ends all. No rank waits for another longer than ``init_process_group(timeout=)``, so the
      timeout has to be longer than anything one rank does alone, such as writing the last checkpoint.

    Args:
        bus: with the hooks on it; a new one if None.
        model: a module, or several by name.
        optimizer: an optimizer, or several by name. Steps are counted (and published) wherever they are made.
        work_dir: directory for files. Needed for checkpoints.
        device: models and batches are moved to it; None leaves the model on its device, and batches follow it.
        seed: for Python, numpy and torch, set when the run begins. The model's weights are drawn before: call
            ``torch.manual_seed`` before you make it.
        stateful: other objects with ``state_dict`` and ``load_state_dict`` that checkpoints must hold, by name.
        resume: ``"auto"`` for the newest good checkpoint in ``work_dir`` or where the hooks save (a new run if there is none),
            the path or URL of a file, or that of a directory for the newest good checkpoint in it.
        strict: False loads from a checkpoint of another model or optimizer what fits.
        name: of the experiment; by default that of the work dir.
        config: of the user, for the record (see ``RuntimeInfoHook``).
        counters: of an earlier run to continue (``TrainLoop`` passes its own).

    Raises:
        ConfigurationError: an option that cannot work.
    """

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
    ) -> None:
        self.bus = bus if bus is not None else Bus()
        self.models = named("model", model, torch.nn.Module)
        self.optimizers = named("optimizer", {} if optimizer is None else optimizer, torch.optim.Optimizer)
        for one in self.optimizers.values():
            stepping(one)  # checks now that its steps can be counted
        self.stateful = checked_stateful(stateful or {})
        self.work_dir = None if work_dir is None else checked_work_dir(work_dir).absolute()
        self.device = device_of(device, self.models)
        self.seed = None if seed is None else checked_seed(seed)
        self.name = name or (self.work_dir.name if self.work_dir else "run")
        self.config = config or {}
        self.counters = counters or Counters()
        self.state = RunState(self.counters, self.optimizers, lambda: window_open(self.bus.hooks))
        self.info: dict[str, Any] = {}
        self.shared = Shared()
        self.validates: bool | None = None
        """Whether validations belong to the training; None in a loop of the user's own that has made none yet."""
        self.resumed_from: AnyPath | None = None
        self.options = options_given(self.optimizers, seed)
        self._feeds = Feeds(self.device)
        self._saves = Saves(self, self._feeds)
        self._restore = Restore(self, self._saves, resume, strict=strict)
        session = Session(self, self.bus, self.state, self._feeds, self._saves, self._restore, moves=device is not None)
        self._driver = Driver(self, self.bus, self.state, self._feeds, self._saves, session)
        self._bodies = Bodies(self._driver)

    @property
    def model(self) -> torch.nn.Module:
        """The model, or the first of several."""
        first: torch.nn.Module = next(iter(self.models.values()))
        return first

    @property
    def unwrapped_model(self) -> torch.nn.Module:
        """The model inside its wrappers: those of DDP, FSDP, ``DataParallel``, ``torch.compile``, DeepSpeed and Accelerate."""
        model: torch.nn.Module = unwrapped(self.model)
        return model

    @property
    def progress(self) -> Progress:
        """How far the run has come: the snapshot that events carry."""
        return self.state.progress

    @property
    def rank(self) -> int:
        """Which of the training's processes this is; 0 where there is one."""
        return this_rank()

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return world_size()

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs that the current iteration has reported so far."""
        return self.state.outputs

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training: a validation that is part of it, and not ``loop.val()``."""
        return self.state.training

    @property
    def updated(self) -> bool:
        """True if an optimizer has stepped in the current iteration."""
        return bool(self.state.stepped)

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if ``optimizer``, one of this run, has stepped in the current iteration."""
        return id(optimizer) in self.state.stepped

    @property
    def last_batch(self) -> bool:
        """True if the current training batch is the last one of its epoch (or of an iteration-based run)."""
        return self._driver.last_batch

    def drive(self) -> Driver:
        """Return the driver of this run, for control flow that is not a ``for`` statement; always the same object.

        Call its ``begin_run()``, or use it inside of ``with run:``. See :class:`~eventloop.training.Driver`.
        """
        return self._driver

    @check_options
    def epochs(self, max_epochs: Limit | None = None, *, max_iters: Limit | None = None) -> Epochs:
        """Iterate over the indices of the epochs that are left; publishes ``before_train`` and ``after_train`` around them.

        Args:
            max_epochs: number of epochs in all; or else
            max_iters: number of iterations of one long epoch (use ``run.train(loader, endless=True)``).
        """
        if (max_epochs is None) == (max_iters is None):
            raise ConfigurationError(f"max_epochs={max_epochs} and max_iters={max_iters}: give run.epochs() one of them")
        self.counters.max_epochs = max_epochs
        self.counters.max_iters = max_iters
        return Epochs(self._bodies)

    @check_options
    def train(self, loader: Data, *, endless: bool = False) -> TrainBatches:
        """Iterate over the batches of one epoch on their device; publishes its events around the body.

        ``break`` ends the iteration without its ``after_train_iter``. The next call of the run (a validation, the next epoch)
        ends the epoch. In ``with run.train(loader) as batches:`` the end of the block counts instead of the ``for`` statement.

        Args:
            loader: any iterable of batches that can be iterated again.
            endless: begin the loader anew when it is used up, within the same epoch (iteration-based training).
        """
        return TrainBatches(self._bodies, self._feeds.for_training(loader), endless=endless)

    @check_options
    def validate(self, loader: Data, metrics: NamedMetrics | None = None) -> EvaluationBatches:
        """Iterate over validation batches, in evaluation mode and without gradients, and publish the events of a validation.

        Reported outputs feed ``metrics`` and, where they are scalars, means; the result is in ``.metrics`` afterwards.
        Called in the body of ``run.train``, it ends that iteration first.

        ``break`` ends the validation without its ``after_val``, and gives modes, gradients and weights back. Where batches are
        drawn in another way (``enumerate`` in a variable, ``next``), ``with run.validate(loader) as batches:`` does it.
        """
        self.validates = True
        feed = self._feeds.for_evaluation(loader, "val_data")
        return EvaluationBatches(self._bodies, feed, self._feeds.metrics(metrics), "val")

    @check_options
    def test(self, loader: Data, metrics: NamedMetrics | None = None) -> EvaluationBatches:
        """Iterate over test batches; like :meth:`validate` with the events of a test."""
        feed = self._feeds.for_evaluation(loader, "test_data")
        return EvaluationBatches(self._bodies, feed, self._feeds.metrics(metrics), "test")

    def report(self, *unnamed: Any, **entries: Any) -> None:
        """Add entries to the outputs of the current iteration, by name; tensors stay on their device."""
        if unnamed:
            raise TrainingError("run.report() takes its entries by name, such as run.report(loss=loss)")
        self.state.check_open("run.report()")
        self.state.outputs.update(entries)

    def report_image(self, name: str, image: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Publish ``image_reported``, for writers that take images. Without a subscriber it costs nothing.

        Offloaded handlers get a copy, so the image may be changed or freed afterwards.

        Args:
            name: such as ``"samples"``; writers put the stage before it.
            image: height × width, channels × height × width or height × width × channels (where both could be meant,
                channels first); 1, 3 or 4 channels; bytes, or booleans and floats from 0 to 1.

        Raises:
            TrainingError: outside of ``with run:``.
            ValueError: another shape or kind of numbers.
        """
        self.state.check_open("run.report_image()")
        if self.bus.wants(ev.ImageReported):
            check_image(name, image)
            self.publish(ev.ImageReported, name=name, image=image)

    def publish(self, event: type[Event], **payload: Any) -> None:
        """Publish an event of this class, with this run and its progress filled in where it has fields for them."""
        if isinstance(event, Event):
            raise TrainingError(
                f"run.publish() makes the event itself: run.publish({type(event).__name__}, ...) with its fields by name, so "
                "that run and progress are filled in; bus.publish(...) takes a finished one"
            )
        if self.bus.wants(event):
            try:
                made = event(run=self, progress=self.state.progress, **payload)
            except TypeError:  # a plain Event, or a mistake in the payload; the run's own events pay nothing for it
                if issubclass(event, RunEvent):
                    raise
                ours = {"run": self, "progress": self.state.progress}
                made = event(**{name: ours[name] for name in ours if name in event.__struct_fields__}, **payload)
            self.bus.publish(made)

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost open scope ends, however it ends; last registered, first called."""
        self.state.scopes.defer(undo)

    def stop(self, reason: str = "") -> None:
        """End the run at the next safe mount point: after an iteration whose accumulation window is complete.

        Scopes cut short by it (epoch, validation) do not publish their ``after_x``; the train scope and the run end in order.
        Safe from any thread and from signal handlers: it takes no lock and logs nothing. Several processes end after the same
        iteration, at the latest the next one; in a validation only if all ranks have as many batches, else at its end.

        Args:
            reason: for the record; in ``run.info["stop_reason"]`` at ``after_run``.
        """
        if reason:
            # Not into run.info yet: a signal handler may strike while the training thread goes through it.
            self.state.stop_reason = reason
        self.state.stop = True
        self.state.wake()

    def cancel(self) -> None:
        """End the run as an exception would: raises :class:`RunCancelled` on the training thread.

        It does so at the next safe mount point, or in a publish that waits for room in a full lane. Open scopes do not
        publish their ``after_x``, nothing is saved. Safe from any thread and from signal handlers.
        """
        self.state.cancelled = True
        self.state.wake()

    def pause(self) -> None:
        """Have the run wait at the next safe mount point, after the iteration under way, until :meth:`resume`.

        Safe from any thread and from signal handlers. :meth:`stop`, :meth:`cancel`, the cancellation of ``await loop.arun()``
        and Ctrl-C end the waiting at once. Offloaded handlers go on meanwhile. With several processes all of them pause after
        the same iteration; the rank that has asked for it resumes them.
        """
        self.state.paused = True

    def resume(self) -> None:
        """Have a paused run go on. Safe from any thread and from signal handlers."""
        self.state.paused = False
        self.state.wake()

    @check_options
    def set_lr(self, lr: Rate, optimizer: str | int | None = None) -> None:
        """Set the learning rate of all parameter groups at the next safe mount point, after the iteration under way.

        A schedule goes on from there: what ``ParamSchedulerHook`` steps is scaled by the same factor, so that each later rate
        is the schedule's, times the new rate over the old one. A scheduler that your own code steps may set its own rates
        again, if it computes them from its ``base_lrs`` (``LambdaLR``). Checkpoints hold the new rates. Safe from any thread
        and from signal handlers; with several processes it is for all of them, whichever asks.

        Args:
            lr: the new rate.
            optimizer: name or index of one of several; all by default.

        Raises:
            ConfigurationError: a rate that is not above 0 and finite, or an optimizer that the run has not.
        """
        names = tuple(self.optimizers)
        if not math.isfinite(lr):
            raise ConfigurationError(f"lr={lr!r}: give a number above 0")
        if not names:
            raise ConfigurationError("run.set_lr(): the run has no optimizer; give Run(optimizer=...) one")
        if optimizer is not None:
            chosen = [name for index, name in enumerate(names) if optimizer in (name, index)]
            if not chosen:
                told = ", ".join(map(repr, names))
                raise ConfigurationError(f"optimizer={optimizer!r}: the run has {told}; give a name or an index")
            names = tuple(chosen)
        self.state.rates.append((float(lr), names))

    def checkpoint_now(self) -> None:
        """Save at the next safe mount point, under ``iter_<n>.safetensors``. Safe from any thread and signal handlers.

        Raises:
            ConfigurationError: the run has no work dir.
        """
        self._saves.directory()
        self.state.save_now = True

    def request_save(
        self,
        name: str,
        *,
        directory: str | AnyPath | None = None,
        leave_out: Collection[str] = (),
        on_error: OnError = "raise",
        staging: Staging = "block",
        busy: Busy = "wait",
    ) -> None:
        """Save under ``name`` once the last subscriber of the current mount point has run.

        With several processes all of them ask, at the same mount point; rank 0 writes, and the random states of all are in it.
        Inside an accumulation window the save waits for the window's step. Requests of one moment are one write.
        Only a training saves: in a validation or test of its own (``loop.val()``) the request is logged and skipped.

        Args:
            name: file name.
            directory: here, or a URL; the work dir by default.
            leave_out: keys of the checkpoint that are not to be in it, such as ``"optimizer"`` (a run cannot resume exactly
                then) or those that hooks add.
            on_error: ``"raise"`` ends the run when the file cannot be written, ``"log"`` goes on.
            staging: ``"block"`` copies the state now; ``"overlap"`` copies what only optimizers change during the next
                forward and backward pass (not in a validation or test; see :mod:`eventloop.checkpoint.overlap`).
            busy: when another save is being written: ``"wait"`` for it, ``"skip"`` this one, or ``"replace"`` the one that
                waits.

        Raises:
            ConfigurationError: neither a directory nor a work dir, or outside of ``with run:``.
        """
        path = self._saves.directory(directory) / name
        self._saves.request(SaveRequest(path, frozenset(leave_out), on_error, staging=staging, busy=busy))

    def keeps_checkpoints_in(self, directory: str | AnyPath) -> None:
        """Have ``resume="auto"`` look there, too; for hooks that save elsewhere than in the work dir, before the run begins."""
        self._saves.directories.append(as_path(directory))

    def note_options(self, owner: str, options: Any) -> None:
        """Note options that a checkpoint overrides; a resume warns of those that the program gives in another way now.

        Args:
            owner: key of the checkpoint that holds them, such as ``"optimizer"``.
            options: mappings, lists and plain values in any nesting; anything else is left out.
        """
        self.options |= by_path(options, owner)

    def check_savable(self, *, directory: str | AnyPath | None = None, **options: Any) -> list[str]:
        """Check now that a save with these options of :meth:`request_save` will work.

        Returns:
            The keys that the checkpoint would have; none on a rank that writes none.

        Raises:
            CheckpointValueError: the state holds something that no checkpoint can hold; with its path.
            ConfigurationError: a sharded model cannot be saved like this.
        """
        options["leave_out"] = frozenset(options.get("leave_out", ()))
        request = SaveRequest(self._saves.directory(directory), **options)
        return self._saves.check(request, copy=not self.rank)

    def wait_for_saves(self) -> None:
        """Wait until nothing is being written."""
        self._saves.wait()

    def gather_state(self, into: MutableMapping[str, Any]) -> None:
        """Put the whole state of the run into a checkpoint that another program writes, under ``"trainbus"``.

        That entry is a tree of tensors (by reference, as in a ``state_dict()``) and plain values, which
        ``torch.load(weights_only=True)`` opens. :meth:`apply_state` of another run goes on from it, bit by bit. With several
        processes all of them call, and each gets the states of all.

        Call it from the training thread between iterations: after the ``for`` statement over ``run.train(loader)``, between
        epochs, in and after validations. Handlers use :meth:`request_save`.

        Raises:
            TrainingError: an iteration is under way, a handler calls, or the run is not open.
            ConfigurationError: a model is sharded.
            CheckpointValueError: the state holds something else than tensors and plain values, with its path.
        """
        self.state.check_open("run.gather_state()")
        if _in_handler():
            raise TrainingError(
                "run.gather_state() was called by a handler, and the handlers after it have yet to change the state. Call it "
                "where the training loop is, between iterations; or let the handler call run.request_save()"
            )
        self._bodies.drop_left_iteration()
        if "iter" in self.state.scopes:
            raise TrainingError(
                "run.gather_state() was called within an iteration, whose step is not counted yet. Call it between iterations: "
                "after the `for` statement over run.train(loader), or between two epochs"
            )
        into[HOSTED] = self._saves.gather()

    @check_options
    def apply_state(self, from_: Mapping[str, Any]) -> None:
        """Go on from the state that :meth:`gather_state` put into a checkpoint, or from one of a registered foreign format.

        Call it right after ``with Run(...) as run:``, before ``run.epochs()`` and ``run.train()``, or in a handler of
        ``before_run``. Hooks get ``after_load_checkpoint``, as with ``resume=``; ``strict=`` of the run holds. The training
        leaves ``from_`` as it is, so that several runs can go on from it.

        Raises:
            ConfigurationError: ``from_`` is not a mapping.
            TrainingError: the run has not begun, or its training has.
            CheckpointError: it holds no state of a run, or that of another model or optimizer.
        """
        self._restore.apply_state(from_)

    @property
    def train_data(self) -> Iterable[Any] | None:
        """The loader of the training data; None before the first training epoch."""
        return self._feeds.train.loader if self._feeds.train is not None else None

    @property
    def epoch_length(self) -> int | None:
        """Training batches per epoch, or None where the loader does not know."""
        return self._feeds.train.length if self._feeds.train is not None else None

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the validation or test under way (or the last one), or None where the loader does not know."""
        return self._feeds.evaluated.length if self._feeds.evaluated is not None else None

    @property
    def total_iters(self) -> int | None:
        """Iterations this run is going to make in all, or None where that cannot be known."""
        if self.counters.max_iters is not None:
            return self.counters.max_iters
        if self.counters.max_epochs is None or self.epoch_length is None:
            return None
        return self.counters.max_epochs * self.epoch_length

    def __enter__(self) -> Self:
        self._driver.begin_run()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            if self.state.scopes.innermost:  # else the driver has ended it
                self._end(error)
        finally:
            self._bodies.forget()

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            try:
                self._bodies.close()
            except BaseException as failure:
                self._driver.fail(failure)
                raise
            self._driver.end_run()
        else:
            self._driver.fail(error)


def _in_handler() -> bool:
    """Return True if a handler of a run's event is the caller, on this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not Run.publish.__code__:
        frame = frame.f_back
    return frame is not None
