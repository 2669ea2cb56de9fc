"""Every mount point that trainbus declares, in the order of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from trainbus.eventloop.events.event import ABSENT, Counter, Event, Live, Progress, Scalars, registry
from trainbus.eventloop.events.run_view import RunView


class RunEvent(Event, kw_only=True):
    """Base class of the events of a run: the run and its progress."""

    group: ClassVar[bool] = True
    run: Live[RunView] = ABSENT
    progress: Progress


class BeforeEpoch(RunEvent, kw_only=True):
    """An epoch begins, in any stage."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "epoch"


class AfterEpoch(RunEvent, kw_only=True):
    """An epoch has ended, in any stage. ``metrics`` is empty for training epochs."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "epoch"
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)


class BeforeIter(RunEvent, kw_only=True):
    """A batch is on its device and about to be used, in any stage."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "iter"
    batch_idx: int = 0
    batch: Live[Any] = ABSENT


class AfterIter(RunEvent, kw_only=True):
    """A batch has been through the model, in any stage. ``outputs`` holds ``loss`` and the step's other outputs."""

    group: ClassVar[bool] = True
    counts: ClassVar[Counter] = "iter"
    batch_idx: int = 0
    batch: Live[Any] = ABSENT
    outputs: Scalars = ABSENT


class BeforeRun(RunEvent, kw_only=True):
    """The run is set up: models on their device, bus open, nothing has happened yet."""


class AfterLoadCheckpoint(RunEvent, kw_only=True):
    """A checkpoint was read and is about to be applied; hooks may change ``checkpoint`` in place.

    ``progress`` is that of the checkpoint.
    """

    path: str = ""
    checkpoint: Live[dict[str, Any]] = ABSENT


class BeforeTrain(RunEvent, kw_only=True):
    """Training begins or is resumed."""


class BeforeTrainEpoch(BeforeEpoch, kw_only=True):
    """A training epoch begins, before the first use of its loader."""


class BeforeTrainIter(BeforeIter, kw_only=True):
    """A training batch is about to be used."""


class BeforeForward(RunEvent, kw_only=True):
    """The user's step is about to be called (training only)."""

    counts: ClassVar[Counter] = "iter"
    batch: Live[Any] = ABSENT


class AfterForward(RunEvent, kw_only=True):
    """The user's step has returned ``outputs`` (training only)."""

    counts: ClassVar[Counter] = "iter"
    outputs: Scalars = ABSENT


class AfterTrainIter(AfterIter, kw_only=True):
    """The forward pass is done. The optimizer update subscribes at priority 30: handlers after it see new weights."""


class BeforeBackward(RunEvent, kw_only=True):
    """``loss`` (scaled for accumulation) is about to be differentiated. Published while after_train_iter runs."""

    counts: ClassVar[Counter] = "iter"
    loss: Live[torch.Tensor] = ABSENT


class AfterBackward(RunEvent, kw_only=True):
    """Gradients of this micro-batch are in ``.grad``."""

    counts: ClassVar[Counter] = "iter"


class BeforeOptimizerStep(RunEvent, kw_only=True):
    """An optimizer is about to step; gradients are unscaled and clipped. Not published for a step the scaler skips."""

    counts: ClassVar[Counter] = "update"
    name: str = ""
    optimizer: Live[torch.optim.Optimizer] = ABSENT


class AfterOptimizerStep(RunEvent, kw_only=True):
    """An optimizer has stepped."""

    counts: ClassVar[Counter] = "update"
    name: str = ""
    optimizer: Live[torch.optim.Optimizer] = ABSENT


class AfterTrainEpoch(AfterEpoch, kw_only=True):
    """A training epoch has ended; ``progress.epoch`` is still its index."""


class BeforeVal(RunEvent, kw_only=True):
    """Validation begins; the model is in evaluation mode."""

    counts: ClassVar[Counter] = "validation"


class BeforeValEpoch(BeforeEpoch, kw_only=True):
    """The pass over the validation data begins."""

    counts: ClassVar[Counter] = "validation"


class BeforeValIter(BeforeIter, kw_only=True):
    """A validation batch is about to be used."""

    counts: ClassVar[Counter] = "batch"


class AfterValIter(AfterIter, kw_only=True):
    """A validation batch has been through the model."""

    counts: ClassVar[Counter] = "batch"


class AfterValEpoch(AfterEpoch, kw_only=True):
    """The pass over the validation data has ended with ``metrics``."""

    counts: ClassVar[Counter] = "validation"


class AfterVal(RunEvent, kw_only=True):
    """Validation has ended; the model is back in the mode it was in."""

    counts: ClassVar[Counter] = "validation"


class ImageReported(RunEvent, kw_only=True):
    """An image or a figure was reported. An offloaded handler gets a copy of the image on the host."""

    counts: ClassVar[Counter] = "iter"
    name: str
    image: Any


class HistogramReported(RunEvent, kw_only=True):
    """A histogram was reported. An offloaded handler gets a copy of the values on the host."""

    counts: ClassVar[Counter] = "iter"
    name: str
    values: Any
    bins: int


class TextReported(RunEvent, kw_only=True):
    """A text was reported."""

    counts: ClassVar[Counter] = "iter"
    name: str
    text: str


class BeforeSaveCheckpoint(RunEvent, kw_only=True):
    """The state was gathered and is about to be staged; hooks may change ``checkpoint`` in place.

    ``run.checkpoints.check`` also publishes it to check the state, and then writes no file: ``path`` is ``"."``. It is empty
    where another library names the file later.
    """

    path: str = ""
    checkpoint: Live[dict[str, Any]] = ABSENT


class CheckpointStaged(RunEvent, kw_only=True):
    """The state was copied, and training continues while the copy is written.

    The checkpoint is committed when the offloaded handlers of this event have returned, or after half of the bus's
    ``abort_timeout``. So they can make data of a resumed run durable, such as log lines of earlier iterations.
    """

    path: str = ""


class CostsMeasured(Event, kw_only=True):
    """The costs of the run so far; every two seconds of a run while ``bus.timing`` is on, from a thread of the recorder.

    ``costs`` is an :class:`trainbus.observe.Costs`, summed since the beginning of the run.
    """

    progress: Progress
    costs: Any


class RunPaused(Event, kw_only=True):
    """``run.pause()`` has taken effect: the training thread waits, and publishes this first."""

    progress: Progress


class RunResumed(Event, kw_only=True):
    """The pause of a run has ended, by ``run.unpause()`` or ``run.stop()``."""

    progress: Progress


class LearningRateSet(Event, kw_only=True):
    """``run.set_lr()`` has taken effect on the optimizers with these names."""

    progress: Progress
    lr: float
    optimizers: list[str]


class RanksMeasured(Event, kw_only=True):
    """The times of the last iterations on each rank; every two seconds while ``bus.timing`` is on, with several processes.

    Published on all ranks that measure, from a thread of the recorder. ``ranks`` is an :class:`trainbus.observe.RankCosts`,
    equal on all ranks. Its ``straggler`` is a rank that the others have waited for in three comparisons in a row.
    """

    progress: Progress
    ranks: Any


class CheckpointCommitted(Event, kw_only=True):
    """A checkpoint is durable on disk. Published, with its inline handlers, on the thread that wrote it.

    ``progress`` is that in the file, as of the other events of checkpoints: the iteration or epoch that ended with it counts.
    ``names`` are the file's new names, such as the best checkpoint's, and ``path`` is the first. ``bytes`` is the size of
    the file, or 0 if it was written before under another name. ``seconds`` is the time to write it, ``stall`` the time in
    seconds that the training thread waited for its state to be copied.
    """

    progress: Progress
    path: str
    names: list[str] = msgspec.field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    stall: float = 0.0


class CheckpointUploaded(Event, kw_only=True):
    """A store has a checkpoint that was committed before. Published on the uploading thread.

    ``path`` is its URL, ``file`` the file on this machine, which may be removed now. ``bytes`` is its size, and ``seconds`` the
    time to upload it. Of a sharded model that is the part of this rank.
    """

    progress: Progress
    path: str
    file: str
    bytes: int = 0
    seconds: float = 0.0


class CheckpointFailed(Event, kw_only=True):
    """A checkpoint could not be written or uploaded; earlier ones are untouched. Published on the writing or uploading thread.

    ``kept`` is the file on this machine that a store did not take; empty if no file could be written. Of a sharded model it is
    the directory with this rank's part, where this machine does not have the file.
    """

    progress: Progress
    path: str
    names: list[str] = msgspec.field(default_factory=list)
    error: str
    kept: str = ""


class CheckpointSkipped(Event, kw_only=True):
    """A due checkpoint was dropped before it was written, because of another one (see ``busy=``)."""

    progress: Progress
    path: str
    names: list[str] = msgspec.field(default_factory=list)
    reason: str


class AfterTrain(RunEvent, kw_only=True):
    """Training has ended by itself or by ``stop()`` (not by an exception)."""


class BeforeTest(RunEvent, kw_only=True):
    """Testing begins; the model is in evaluation mode."""

    counts: ClassVar[Counter] = "validation"


class BeforeTestEpoch(BeforeEpoch, kw_only=True):
    """The pass over the test data begins."""

    counts: ClassVar[Counter] = "validation"


class BeforeTestIter(BeforeIter, kw_only=True):
    """A test batch is about to be used."""

    counts: ClassVar[Counter] = "batch"


class AfterTestIter(AfterIter, kw_only=True):
    """A test batch has been through the model."""

    counts: ClassVar[Counter] = "batch"


class AfterTestEpoch(AfterEpoch, kw_only=True):
    """The pass over the test data has ended with ``metrics``."""

    counts: ClassVar[Counter] = "validation"


class AfterTest(RunEvent, kw_only=True):
    """Testing has ended; the model is back in the mode it was in."""

    counts: ClassVar[Counter] = "validation"


class OnException(RunEvent, kw_only=True):
    """An exception (Ctrl-C included) ends the run. Published first; then the scopes unwind, without their ``after_x``."""

    error: str = ""
    exception: Live[BaseException] = ABSENT


class AfterRun(RunEvent, kw_only=True):
    """The run has ended, but not by an exception. ``stopped`` tells that it ended early, and ``reason`` why.

    It ended early by ``run.stop()``, by the trainer's own stop, or by code that left the loop over ``run.epochs(...)``.
    """

    stopped: bool = False
    reason: str = ""


class ModuleEvent(Event, kw_only=True):
    """Base of the mount points inside a model that ``bus.watch`` watches; ``module_name`` is qualified: ``"encoder.0"``."""

    group: ClassVar[bool] = True
    module_name: str = ""
    module: Live[torch.nn.Module] = ABSENT


class BeforeModuleForward(ModuleEvent, kw_only=True):
    """A watched submodule is about to be called with ``inputs`` and ``kwargs``."""

    inputs: Live[tuple[Any, ...]] = ABSENT
    kwargs: Live[dict[str, Any]] = ABSENT


class AfterModuleForward(ModuleEvent, kw_only=True):
    """A watched submodule has returned ``outputs``."""

    inputs: Live[tuple[Any, ...]] = ABSENT
    kwargs: Live[dict[str, Any]] = ABSENT
    outputs: Live[Any] = ABSENT


class BeforeModuleBackward(ModuleEvent, kw_only=True):
    """Gradients with respect to a watched submodule's outputs have arrived."""

    grad_outputs: Live[tuple[Any, ...]] = ABSENT


class AfterModuleBackward(ModuleEvent, kw_only=True):
    """Gradients with respect to a watched submodule's inputs are computed."""

    grad_inputs: Live[tuple[Any, ...]] = ABSENT
    grad_outputs: Live[tuple[Any, ...]] = ABSENT


BUILTIN = tuple(registry)
"""Names of the mount points that trainbus itself declares."""

if not TYPE_CHECKING:  # type checkers would not understand it, and know the classes without
    __all__ = [event.__name__ for event in registry.values()]
