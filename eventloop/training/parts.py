"""The parts of a run: ``run.checkpoints``, ``run.data`` and ``run.steps``; ``run.foreign`` is what another trainer has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from trainbus.eventloop.checkpoint import AnyPath, Busy, Staging, as_path, is_sharded
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError, TrainingError
from trainbus.eventloop.events import Progress
from trainbus.eventloop.training.clipping import clip_gradients
from trainbus.eventloop.training.driver import Driver
from trainbus.eventloop.training.machine import ITERATION
from trainbus.eventloop.training.optimizers import by_path
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.best import Best, best_of
from trainbus.eventloop.training.saves.capture import Capture
from trainbus.eventloop.training.saves.checkpointer import Checkpointer
from trainbus.eventloop.training.saves.requests import OnError, SaveRequest
from trainbus.eventloop.training.saves.restore import HOSTED

_INSTEAD: Final = {
    "gather_state": "the trainer's checkpoints have the state of the bus",
    "apply_state": "the trainer's own resume restores the bus",
}
"""What to do instead of the methods that only :class:`LoopCheckpoints` has."""


class RunPart:
    """A part of a run; base class."""

    def __init__(self, run: SavedRun, driver: Driver) -> None:
        self._run, self._driver = run, driver


class Checkpoints(RunPart):
    """The checkpoints of a run.

    :meth:`save` without a name is safe from any thread and from signal handlers, the rest from the training thread.
    """

    resumed_from: AnyPath | None = None
    """The checkpoint that the run continues; None for a new run."""

    @property
    def _checkpointer(self) -> Checkpointer:
        return self._run.checkpointer

    @property
    def directory(self) -> AnyPath | None:
        """The directory of checkpoints without one of their own: the work dir, or that of replica groups or of a hook."""
        return self._checkpointer.home

    @property
    def in_parts(self) -> bool:
        """True if each rank writes a part: weights are sharded, or ranks hold different ones."""
        return self._run.coordinator.layout.in_parts or any(map(is_sharded, self._run.models.values()))

    @property
    def suffix(self) -> str:
        """Suffix of this run's checkpoints: ``.safetensors``, or the suffix of the trainer that writes them."""
        return self._run.host.facts.suffix

    @property
    def best(self) -> Best | None:
        """The best checkpoint so far: path, score and metric, by the first metric of ``CheckpointHook(save_best=)``.

        Its file is durable: on rank 0, a new best one counts once it is written. None before the first, and without the option.
        """
        return best_of(self._run.bus)

    def save(
        self,
        name: str = "",
        *,
        directory: str | AnyPath | None = None,
        leave_out: Collection[str] = (),
        on_error: OnError = "raise",
        staging: Staging = "block",
        busy: Busy = "wait",
    ) -> None:
        """Save a checkpoint.

        Without a name, any thread of any rank may call it, and a signal handler, too: ``iter_<n>.safetensors`` is saved in
        :attr:`directory` at the next safe mount point, after the current iteration.

        With a name, all ranks must call it, at the same mount point: the checkpoint is saved after the last subscriber of that.
        Rank 0 writes the file, with the random states of all ranks. Inside an accumulation window the save waits for the
        window's step. Requests at one mount point become one write. A run that only validates or tests (``loop.validate()``)
        logs and skips the request.

        Args:
            name: file name.
            directory: a directory on this machine; the work dir by default.
            leave_out: keys to leave out of the checkpoint, such as ``"optimizer"`` (then a resume is not exact) or keys of
                hooks.
            on_error: if the file cannot be written, ``"raise"`` ends the run, ``"log"`` continues.
            staging: ``"block"`` copies the state now. ``"overlap"`` copies tensors that only optimizers change during the
                next forward and backward pass (not in a validation or test; see :mod:`trainbus.eventloop.checkpoint.overlap`).
            busy: if another save is being written, ``"wait"`` for it, ``"skip"`` this one, or ``"replace"`` the waiting one.

        Raises:
            ConfigurationError: the run has no directory or is not open, or an option does not fit or has no name beside it.
        """
        if not name:
            if directory is not None or leave_out or (on_error, staging, busy) != ("raise", "block", "wait"):
                raise ConfigurationError(
                    "run.checkpoints.save() without a name takes no options: give a name, such as "
                    f"run.checkpoints.save('mine{self.suffix}', ...), on all ranks at the same mount point"
                )
            self._checkpointer.directory()
            self._run.state.own.save = True
            return
        path = self._checkpointer.directory(directory) / name
        with self._run.bus.span("requesting checkpoints"):
            self._checkpointer.request(SaveRequest(path, frozenset(leave_out), on_error, staging=staging, busy=busy))

    def check(self, *, directory: str | AnyPath | None = None, **options: Any) -> list[str]:
        """Raise the error that :meth:`save` with these options would raise; else return the keys of its checkpoint.

        Ranks other than 0 return no keys. A :class:`CheckpointValueError` names the path of the value that does not fit.
        """
        options["leave_out"] = frozenset(options.get("leave_out", ()))
        request = SaveRequest(self._checkpointer.directory(directory), **options)
        return self._checkpointer.check(request, rehearse=not self._run.rank)

    def wait(self) -> None:
        """Wait until no save is being written, or uploaded to a store."""
        self._checkpointer.wait_for_all()

    def keeps_in(self, directory: str | AnyPath) -> AnyPath:
        """Return the directory for a hook that saves elsewhere, and search it for ``resume="auto"``. Call it before the run.

        It is another one (``out-2``) if a new run has no work dir and the directory has a run already.
        """
        return self._checkpointer.add_directory(as_path(directory))

    def mirrored_by(self, mirror: Any) -> None:
        """Have a mirror upload what is saved to its directory. Call it before the run."""
        self._checkpointer.mirrors.append(mirror)

    def note_options(self, owner: str, options: Any) -> None:
        """Record options that a checkpoint overrides; a resume warns about options that the program changed.

        Args:
            owner: checkpoint key that holds them, such as ``"optimizer"``.
            options: nested mappings, lists and plain values; other values are ignored.
        """
        self._run.options |= by_path(options, owner)

    if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; that of a method of loops tells the way out."""
            if name not in _INSTEAD:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(
                f"run.checkpoints.{name}() is for your own loop, and here another trainer has the loop: {_INSTEAD[name]}"
            )


class LoopCheckpoints(Checkpoints):
    """The checkpoints of a run of your own loop, whose state may be in checkpoints of other programs."""

    def gather_state(self, into: MutableMapping[str, Any]) -> None:
        """Add the whole state of the run, under ``"trainbus"``, to a checkpoint that another program writes.

        The entry is a tree of tensors (by reference, as in a ``state_dict()``) and plain values, which
        ``torch.load(weights_only=True)`` can load. :meth:`apply_state` of another run continues from it bit by bit.

        Call it on all ranks, on the training thread and between iterations: after the ``for`` statement over
        ``run.train(loader)``, between epochs, in and after validations. Handlers use :meth:`~Checkpoints.save`.

        Raises:
            TrainingError: the call is inside an iteration or a handler, or the run is not open.
            ConfigurationError: a model is sharded.
            CheckpointValueError: a value is neither a tensor nor a plain value; the error names its path.
        """
        state = self._run.state
        state.check_open("run.checkpoints.gather_state()")
        if not state.in_handlers:
            state.end_left()
        if state.in_handlers or state.machine.innermost is ITERATION:
            raise TrainingError(
                "run.checkpoints.gather_state() was called within an iteration or a handler: call it in the training loop, "
                "after the `for` statement over run.train(loader) or between two epochs; a handler calls "
                "run.checkpoints.save(name), because later handlers may still change the state"
            )
        saver = self._run.host.saver
        assert isinstance(saver, Capture)  # noqa: S101 - a loop of one's own has it
        into[HOSTED] = saver.gather()

    @check_options
    def apply_state(self, from_: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that holds the entry of :meth:`gather_state`, or has a registered foreign format.

        Call it right after ``with Run(...) as run:``, or in a handler of ``before_run``. As with ``resume=``, hooks get
        ``after_load_checkpoint``, and ``strict=`` applies. Several runs can continue from the same ``from_``.

        Raises:
            TrainingError: the run has not begun, or its training has begun.
            CheckpointError: the checkpoint has no state of a run, or belongs to another model or optimizer.
        """
        self._checkpointer.restore.apply_state(from_)


class RunData(RunPart):
    """The data of a run: its loaders and their lengths."""

    @property
    def train(self) -> Iterable[Any] | None:
        """The loader of the training; None before the first training epoch of your own loop."""
        return self._run.host.train_data

    @property
    def evaluation(self) -> Iterable[Any] | None:
        """The loader of the current or last validation or test; None before the first, and in another trainer."""
        feed = self._run.feeds.evaluated
        return None if feed is None else feed.loader

    @property
    def num_replicas(self) -> int:
        """How many ranks, or groups of ranks that hold one copy of the model together, train on different batches.

        For samplers, with :attr:`rank`: ``DistributedSampler(dataset, run.data.num_replicas, run.data.rank)``. If that cannot
        be told, each rank counts, and a warning says so when the run begins.
        """
        return self._run.coordinator.layout.data.size

    @property
    def rank(self) -> int:
        """The number of this rank, or of its group, among those that train on different batches."""
        return self._run.coordinator.layout.data.rank

    @property
    def epoch_length(self) -> int | None:
        """Training batches per epoch; None if unknown."""
        return self._run.host.epoch_length

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the current or last validation or test; None if unknown."""
        return self._run.host.evaluation_length

    @property
    def total_iters(self) -> int | None:
        """Total iterations of the run; None if unknown."""
        counters = self._run.state.counters
        if counters.max_epochs is None or self.epoch_length is None:
            return counters.max_iters
        return counters.max_epochs * self.epoch_length

    @property
    def one_epoch(self) -> bool:
        """True if the training is one long epoch (``max_iters``, and data that begins again); known once the epoch begins."""
        feed = self._driver.feed
        return self._run.state.counters.max_iters is not None and feed is not None and feed.endless

    @property
    def last_batch(self) -> bool:
        """True if the current training batch is the last one of its epoch (or of an iteration-based run)."""
        return self._driver.last_batch


class RunSteps(RunPart):
    """The steps of a run's optimizers in the current iteration."""

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how often an optimizer of the run has stepped in the current iteration."""
        return self._run.state.stepped.get(id(optimizer), 0)

    def between(self, call: Callable[[torch.optim.Optimizer, Progress], object]) -> None:
        """Call ``call(optimizer, progress)`` before an optimizer steps again in the same iteration, until the run ends.

        With ``after_train_iter`` a hook then sees the weights after each step, of a body that makes several steps, too.
        """
        if call not in self._run.state.between_steps:
            self._run.state.between_steps.append(call)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        optimizers: Collection[torch.optim.Optimizer] | None = None,
    ) -> torch.Tensor:
        """Clip all gradients in place by their norm over the whole model, and return the norm, for a loop of your own.

        As ``torch.nn.utils.clip_grad_norm_``, but the norm is a plain tensor, and also right where gradients are on several
        meshes, or where only some ranks hold them: pipeline stages, local experts. Then all ranks must call it.

        Args:
            max_norm: the largest norm.
            norm_type: the order of the norm; it may be ``inf``.
            error_if_nonfinite: raise RuntimeError for a norm that is not finite.
            foreach: whether to use the faster kernels; by default where there are some.
            optimizers: those whose parameters are meant; all by default.
        """
        wanted = {
            name: one
            for name, one in self._run.optimizers.items()
            if optimizers is None or any(one is other for other in optimizers)
        }
        return clip_gradients(
            self._run, wanted, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach
        )

    @property
    def accumulation(self) -> int | None:
        """Iterations per step, from the update on the bus or the accelerator; None if your code decides."""
        return self._run.host.accumulation


class Foreign(msgspec.Struct):
    """What another trainer, or the ``accelerator``, has; empty in your own loop."""

    schedulers: Collection[object] = ()
    """Learning-rate schedulers that it steps."""
    averages: Collection[str] = ()
    """Names of its parts that average the weights, too."""
    settings: Mapping[str, Any] = {}
    """Settings for the record: ``precision``, ``schedule``."""
