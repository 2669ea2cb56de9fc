"""``RayTrainHook``: a run in a worker of Ray Train, whose metrics and checkpoints Ray's users find where they look for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from eventloop import CheckpointError, Hook, Priority, check_options, events, get_logger, mount, register
from eventloop.bridges.ray import RayReports, RayWorker
from eventloop.checkpoint import remove
from hooks.copies import CopiedAnew
from hooks.options import added_late
from hooks.retention import KEPT, RetentionPolicy

_END = 30.0  # seconds for Ray to take what is left at the end of a run; it takes a report each 2 s

log = get_logger()

Seconds = Annotated[float, Meta(gt=0, le=86400, description="seconds above 0")]


@register
class RayTrainHook(CopiedAnew, Hook):
    """Train in the ``train_func`` of a Ray Train ``TorchTrainer``.

    - A run without ``work_dir=`` gets Ray's storage path of the run, ``storage_path/name``, which all workers reach. With
      ``resume="auto"`` it goes on from the newest good save there, whether Ray knows it or not.
    - Ray is told of each durable checkpoint: ``Result.checkpoint``, ``best_checkpoints`` and ``get_checkpoint()`` are folders
      ``checkpoint_iter_50`` with a hard link to the file. With ``CheckpointConfig(num_to_keep=...)`` a file goes when Ray
      deletes its folder, unless a ``CheckpointHook(max_keep_ckpts=...)`` keeps it, or ``save_best``.
    - The metrics of a checkpoint are the newest plain numbers of the training and of the validation of these weights. A name
      that both have gets ``val_`` before it for the validation.
    - When Ray is about to take a machine away, the run saves, and training goes on; it saves once more 5 s before.

    Nothing of this waits on the training thread, or ends the training. Ray's collectives are called on a thread of their own,
    in one order on all ranks: do not call ``ray.train.report()`` beside this hook, but ``run.report()``.

    Args:
        metrics_every: seconds between reports of metrics without a checkpoint. Ray takes a report each 2 s.

    Raises:
        ConfigurationError: when a run is made: this process is not a worker of Ray Train, or the storage path is in a store.
            When training begins: the hook was added during the run.
    """

    priority = Priority.LOWEST
    observes = True
    of_run: ClassVar = {"_reports": NoneType, "_policies": list, "_begun": bool, "_trained": set}

    @check_options
    def __init__(self, metrics_every: Seconds = 5.0) -> None:
        self.metrics_every = metrics_every
        self._reports: RayReports | None = None
        self._policies: list[RetentionPolicy] = []
        self._begun = False
        self._trained: set[str] = set()  # names of numbers of the training

    def default_work_dir(self) -> Path:
        return RayWorker().work_dir()

    def before_run(self, event: events.BeforeRun) -> None:
        run = event.run
        self._policies = run.shared.get(KEPT, [])
        self._reports = RayReports(RayWorker(), every=self.metrics_every, noticed=partial(self._save, run), pruned=self._forget)
        self._begun = False
        run.defer(partial(self._end, run))

    def before_train(self, event: events.BeforeTrain) -> None:
        begun, self._begun = self._begun, True
        if self._reports is None:
            raise added_late(self.label)
        if event.run.work_dir is not None and not begun:
            self._reports.start(event.run.work_dir, event.progress.iter)

    @mount(
        events.AfterTrainIter,
        events.AfterValEpoch,
        events.CheckpointStaged,
        events.CheckpointCommitted,
        events.CheckpointFailed,
        events.CheckpointSkipped,
        offload="thread",
        on_error="log",
    )
    def tell(self, event: Any) -> None:
        """Pass on what happens, in its order."""
        reports = self._reports
        if reports is None:
            return
        match event:
            case events.AfterTrainIter():
                reports.moved()
                numbers = _numbers(event.outputs)
                self._trained.update(numbers)
                reports.measured(numbers | {"epoch": event.progress.epoch, "iter": event.progress.iter + 1})
            case events.AfterValEpoch():
                numbers = _numbers(event.metrics)
                named = {f"val_{name}" if name in self._trained else name: one for name, one in numbers.items()}
                reports.measured(named, validated=True)
            case events.CheckpointStaged():
                reports.staged(event.path)
            case events.CheckpointCommitted():
                reports.committed(event.names, event.progress.iter)
            case events.CheckpointFailed() | events.CheckpointSkipped():
                reports.dropped(event.names)

    @mount(priority=Priority.NORMAL)
    def checkpoint_committed(self, event: events.CheckpointCommitted) -> None:
        if self._reports is not None:
            self._reports.keep(event.path, event.progress.iter)  # on the thread that wrote it, and before tell()

    def on_exception(self, event: events.OnException) -> None:
        if self._reports is not None:
            self._reports.abort()

    def _end(self, run: Any) -> None:
        """Tell Ray what is left. The files are written: this is called when the run's scope ends."""
        reports, self._reports = self._reports, None
        if reports is None:
            return
        try:
            if not reports.aborted:
                self._reports = reports  # for the events that are on their way
                run.bus.drain(_END)
        finally:
            self._reports = None
            reports.end(_END)

    def _save(self, run: events.RunView, info: Any) -> None:
        log.warning("Ray is about to take machines away; saving", ranks=info.preempted_ranks, deadline_ms=info.deadline_ms)
        if run.training:
            run.checkpoint_now()

    def _forget(self, file: Path) -> None:
        """Remove a file whose folder Ray has deleted, unless a hook of the run keeps it for a reason of its own."""
        for policy in self._policies:
            policy.release(file.name)
        if not any(policy.has(file.name) for policy in self._policies):
            with suppress(CheckpointError):  # the file system is busy or gone; nothing depends on it
                remove(file)
                log.debug("removed a checkpoint that Ray has deleted", path=str(file))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain numbers among values: Ray refuses tensors, and its files are JSON."""
    found = {name: value.item() if hasattr(value, "item") else value for name, value in values.items() if _is_scalar(value)}
    return {name: value for name, value in found.items() if isinstance(value, Number) and not isinstance(value, complex)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (hasattr(value, "numel") and value.numel() == 1) or getattr(value, "shape", None) == ()
