"""Requested checkpoints in the format of Ignite's ``Checkpoint``, and the files that its handlers write."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ignite import distributed
from ignite.engine import Engine
from ignite.handlers import Checkpoint, DiskSaver

from trainbus.bridges.ignite import privates
from trainbus.bridges.ignite.saver import TrainbusSaver
from trainbus.convert import Pickled
from trainbus.eventloop.checkpoint import unwrapped


def pickled_states(trainer: Engine, objects: Mapping[str, Any]) -> Pickled | None:
    """Return the states of ``objects`` in the format of ``Checkpoint``, on rank 0."""
    kept: list[Any] = []

    def keep(checkpoint: Any, *_: object) -> None:
        kept.append(checkpoint)

    Checkpoint(objects, keep, n_saved=None)(trainer)
    return Pickled(kept[0]) if distributed.get_rank() == 0 else None


def newest(engines: Iterable[Engine], entry: object) -> Path | None:
    """Return the newest file of all ``Checkpoint`` handlers of the engines that save ``entry`` to a local directory."""
    directories = {Path(one.dirname) for one in _disk_savers(engines, entry) if not isinstance(one, TrainbusSaver)}
    files = [path for directory in directories for path in directory.iterdir() if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def savers(engines: Iterable[Engine], entry: object) -> list[TrainbusSaver]:
    """Return the `TrainbusSaver` of each ``Checkpoint`` handler of the engines that saves ``entry``."""
    return [one for one in _disk_savers(engines, entry) if isinstance(one, TrainbusSaver)]


class _Saved:
    """An object of a checkpoint whose state is known."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state


def with_states(objects: Mapping[str, Any], states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the objects of a checkpoint, with the states in ``states`` (by id) instead of their own."""
    replaced: dict[str, Any] = {}
    for name, value in objects.items():
        if isinstance(value, Mapping):
            replaced[name] = with_states(value, states)
        else:
            key = id(unwrapped(value))
            replaced[name] = _Saved(states[key]) if key in states else value
    return replaced


def _disk_savers(engines: Iterable[Engine], entry: object) -> list[DiskSaver]:
    handlers = [one for engine in engines for one in _handlers(engine) if _holds(one.to_save, entry)]
    return [one.save_handler for one in handlers if isinstance(one.save_handler, DiskSaver)]


def _handlers(engine: Any) -> list[Checkpoint]:
    functions = [inspect.unwrap(one[0]) for handlers in getattr(engine, privates.HANDLERS).values() for one in handlers]
    return [one for one in functions if isinstance(one, Checkpoint)]


def _holds(objects: object, wanted: object) -> bool:
    if isinstance(objects, Mapping):
        return any(_holds(value, wanted) for value in objects.values())
    return objects is wanted
