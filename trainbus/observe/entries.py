"""What an event says about a run, as an entry of its record."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch

from trainbus.eventloop import events as ev
from trainbus.eventloop.plain import plain_config, without_secrets
from trainbus.observe.record import (
    Begin,
    Checkpoint,
    Compared,
    End,
    Entry,
    FailedCheckpoint,
    Measured,
    Pause,
    Resume,
    SkippedCheckpoint,
    Stage,
    Test,
    Validation,
)
from trainbus.observe.states import RunStatus, after_error

CHECKPOINTS: Final = (ev.CheckpointCommitted, ev.CheckpointFailed, ev.CheckpointSkipped)
_STAGES: Final = {ev.BeforeTrain: "train", ev.BeforeVal: "val", ev.BeforeTest: "test"}


def entry_of(event: Any) -> Entry:
    """Return what an event says. Reads live fields of ``before_run`` and of the ends of a run only, and waits for no device.

    Raises:
        TypeError: events of this type are not a part of the story.
    """
    if isinstance(event, ev.BeforeRun):
        return begin_of(event.run)
    at = {"time": time.time(), "epoch": event.progress.epoch, "iter": event.progress.iter}
    match event:
        case ev.BeforeTrain() | ev.BeforeVal() | ev.BeforeTest():
            return Stage(**at, name=next(name for kind, name in _STAGES.items() if isinstance(event, kind)))
        case ev.AfterLoadCheckpoint():
            return Resume(**at, path=str(event.path))
        case ev.AfterValEpoch():
            return Validation(**at, metrics=scalars(event.metrics))
        case ev.AfterTestEpoch():
            return Test(**at, metrics=scalars(event.metrics))
        case ev.CheckpointCommitted():
            return Checkpoint(**at, names=_names(event), bytes=event.bytes, stall=event.stall, seconds=event.seconds)
        case ev.CheckpointFailed():
            kept = f"; kept as {event.kept}" if event.kept else ""
            return FailedCheckpoint(**at, names=_names(event), reason=event.error + kept)
        case ev.CheckpointSkipped():
            return SkippedCheckpoint(**at, names=_names(event), reason=event.reason)
        case ev.RunPaused() | ev.RunResumed():
            return Pause(**at, begins=isinstance(event, ev.RunPaused))
        case ev.CostsMeasured():
            return Measured(**at, costs=event.costs)
        case ev.RanksMeasured():
            return Compared(**at, ranks=event.ranks)
        case ev.OnException():
            return End(**at, state=after_error(event.exception), reason=event.error)
        case ev.AfterRun():
            return End(**at, state=RunStatus.STOPPED if event.stopped else RunStatus.FINISHED, reason=event.reason)
    raise TypeError(f"{type(event).__name__} is not a part of the story of a run")


def begin_of(run: Any) -> Begin:
    """Return the beginning of a run; of events that belong to none, without anything but a name."""
    if run is None or run is msgspec.UNSET:
        return Begin(time=time.time(), name="run")
    work_dir = None if run.work_dir is None else str(run.work_dir)
    facts = {
        "name": run.name,
        "seed": run.seed,
        "config": without_secrets(plain_config(run.config)),
        "world_size": run.world_size,
    }
    return Begin(time=time.time(), **facts, work_dir=work_dir, advice=run.work_dir_advice, run=weakref.ref(run))


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among values, and the tensors and arrays of one element, on whichever device they are."""
    found = ((name, value) for name, value in values.items() if _is_scalar(value))
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in found}


def _names(event: Any) -> list[str]:
    return event.names or [event.path]


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float)
