"""``RayTrainHook``: a run in a worker of Ray Train, whose metrics and checkpoints Ray's users find where they look for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from trainbus.bridges.ray.folders import searched_folders
from trainbus.bridges.ray.reports import RayReports
from trainbus.bridges.ray.worker import RayWorker
from trainbus.eventloop import CheckpointError, ConfigurationError, Hook, Priority, check_options, events, get_logger, mount
from trainbus.eventloop.checkpoint import AnyPath, RemotePath, remove_whole
from trainbus.eventloop.registry import register
from trainbus.eventloop.seams import Seam
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.mirror import Mirror
from trainbus.hooks.options import added_late
from trainbus.hooks.retention import KEPT, RetentionPolicy
from trainbus.hooks.scores import BestMetrics
from trainbus.hooks.sharded_mirror import mirror_of

WORKER: Final = Seam(RayWorker)
END: Final = Seam(30.0)  # seconds for Ray to take what is left at the end of a run; it takes a report each 2 s

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
    - If the storage path is in a store (``s3://``), saves are uploaded from a folder on this machine, which also gets logs and
      records. The store copies each save into Ray's folder; beside it, only the newest file stays.
    - The metrics of a checkpoint are the newest plain numbers of the training and of the validation of these weights. A name
      that both have gets ``val_`` before it for the validation.
    - When Ray is about to take a machine away, the run saves, and training goes on; it saves once more 5 s before.

    Nothing of this waits on the training thread, or ends the training. Ray's collectives are called on a thread of their own,
    in one order on all ranks: do not call ``ray.train.report()`` beside this hook, but ``run.report()``.

    Args:
        interval: seconds between reports of metrics without a checkpoint. Ray takes a report each 2 s.

    Raises:
        ConfigurationError: when a run is made: this process is no worker of Ray Train, or the storage path is in a store that
            is not reached. Later: the hook was added during the run, or the bus has two.
    """

    priority = Priority.LOWEST
    observes = True
    of_run: ClassVar = {"_reports": NoneType, "_policies": list, "_mirror": NoneType, "_begun": bool, "_trained": set}

    @check_options
    def __init__(self, interval: Seconds = 5.0) -> None:
        self.interval = interval
        self._reports: RayReports | None = None
        self._policies: list[RetentionPolicy] = []
        self._mirror: Mirror | None = None
        self._asked = _asked()
        self._begun = False
        self._trained: set[str] = set()  # names of numbers of the training

    def in_check(self) -> None:
        return None  # it reports to Ray

    def default_work_dir(self) -> Path:
        return WORKER.value().work_dir()

    def default_checkpoint_dir(self) -> RemotePath | None:
        return folder if isinstance(folder := WORKER.value().folder, RemotePath) else None

    def before_run(self, event: events.BeforeRun) -> None:
        run, worker = event.run, WORKER.value()
        if sum(isinstance(hook, RayTrainHook) for hook in run.bus.hooks) > 1:
            raise ConfigurationError("there are two RayTrainHooks on the bus, and each would tell Ray everything: remove one")
        self._policies = run.shared[KEPT] = run.shared.get(KEPT, [])
        self._mirror, self._asked = None, _asked()
        if isinstance(worker.folder, RemotePath) and run.checkpoints.directory == worker.folder:
            log.info("Ray's storage path is a store; logs and records stay on this machine", work_dir=str(run.work_dir))
            for folder in searched_folders(worker.folder):
                run.checkpoints.keeps_in(folder)
            self._mirror = mirror_of(run, run.work_dir, worker.folder, raises=True)
            self._mirror.clears = run.work_dir == worker.work_dir()
            self._asked.begin(run.work_dir, self._policies, run.checkpoints.suffix, self._mirror, looks=not run.rank)
        self._reports = RayReports(worker, every=self.interval, noticed=partial(self._save, run), pruned=self._forget)
        if self._mirror is not None:
            self._policies.append(_Uncopied(self._mirror, self._reports.uncopied))
        self._begun = False
        run.defer(partial(self._end, run))

    @mount(events.BeforeTrain, events.BeforeTrainEpoch, events.AfterTrainEpoch)
    def check_begun(self, event: events.RunEvent) -> None:
        if self._reports is None:
            raise added_late(self.label)

    def before_train(self, event: events.BeforeTrain) -> None:
        begun, self._begun = self._begun, True
        if self._reports is not None and event.run.checkpoints.directory is not None and not begun:
            self._reports.start(event.run.checkpoints.directory, event.progress.iter)

    @mount(
        events.AfterTrainIter,
        events.AfterValEpoch,
        events.CheckpointStaged,
        events.CheckpointCommitted,
        events.CheckpointUploaded,
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
                reports.staged(self._told(event.path))
            case events.CheckpointCommitted() if self._mirror is None:
                reports.committed(event.names, event.progress.iter)
            case events.CheckpointUploaded():
                reports.committed([event.path], event.progress.iter)
            case events.CheckpointSkipped() | events.CheckpointFailed(kept=""):
                reports.dropped([self._told(name) for name in event.names])

    @mount(priority=Priority.NORMAL)
    def checkpoint_committed(self, event: events.CheckpointCommitted) -> None:
        if self._reports is None:
            return
        if self._mirror is None:
            self._reports.keep(event.path, event.progress.iter)  # on the thread that wrote it, and before tell()
            return
        for name in self._asked.own(event.names):  # those of no other hook, as of checkpoints.save()
            self._asked.adopt(name)
            if self._asked.has(name) and self._mirror.leads:
                self._mirror.keep(name, event.progress, event.bytes)

    @mount(priority=Priority.NORMAL)
    def checkpoint_uploaded(self, event: events.CheckpointUploaded) -> None:
        if self._reports is not None:
            self._reports.keep(event.path, event.progress.iter)

    def _told(self, path: str) -> str:
        """Return the path by which Ray knows a file."""
        return path if self._mirror is None or "://" in path else str(self._mirror.store / Path(path).name)

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
                run.bus.drain(END.value)
        finally:
            self._reports = None
            reports.end(END.value)

    def _save(self, run: events.RunView, info: Any) -> None:
        log.warning(
            "Ray is about to take machines away; saving",
            id="ray-takes-machines",
            ranks=info.preempted_ranks,
            deadline_ms=info.deadline_ms,
        )
        if run.training:
            run.checkpoints.save()

    def _forget(self, file: AnyPath) -> None:
        """Remove a file that Ray keeps or has deleted, unless a hook of the run keeps it for a reason of its own."""
        for policy in self._policies:
            policy.release(file.name)
        self._asked.give_up(file.name)
        if any(policy.has(file.name) for policy in self._policies):
            return
        if self._mirror is not None and file.parent == self._mirror.store:
            self._mirror.drop(file.name)
        else:
            with suppress(CheckpointError):  # the file system is busy or gone; nothing depends on it
                remove_whole(file)
                log.debug("removed a checkpoint that Ray keeps or has deleted", path=str(file))


class _Uncopied(RetentionPolicy):
    """Keeps the files in a store that Ray's folders are still to be copied from."""

    def __init__(self, mirror: Mirror, names: Collection[str]) -> None:
        self.directory, self.mirror = mirror.directory, mirror
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def release(self, name: str) -> None:
        """It is released when it is copied."""


def _asked() -> RetentionPolicy:
    return RetentionPolicy(None, BestMetrics(None, None, None, None))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain numbers among values: Ray refuses tensors, and its files are JSON."""
    found = {name: value.item() if hasattr(value, "item") else value for name, value in values.items() if _is_scalar(value)}
    return {name: value for name, value in found.items() if isinstance(value, Number) and not isinstance(value, complex)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (hasattr(value, "numel") and value.numel() == 1) or getattr(value, "shape", None) == ()
