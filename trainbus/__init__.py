"""The public names of trainbus, loaded on first use: those of the engine (``trainbus.eventloop``) and hooks.

The classes of mount points are in ``trainbus.events``, errors in ``trainbus.errors``, images and texts in ``trainbus.media``.

``python -m trainbus`` runs the command ``trainbus``; ``torchrun -m trainbus run`` does so in several processes.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainbus.bridges import TrainbusCheckpointIO as TrainbusCheckpointIO
    from trainbus.bridges import attach as attach
    from trainbus.bridges.ignite.saver import TrainbusSaver as TrainbusSaver
    from trainbus.bridges.ray import RayTrainHook as RayTrainHook
    from trainbus.bridges.torchtitan.manager import TrainbusCheckpointManager as TrainbusCheckpointManager
    from trainbus.compat import TransformersHook as TransformersHook
    from trainbus.config import add_hooks as add_hooks
    from trainbus.eventloop import (
        Bus as Bus,
    )
    from trainbus.eventloop import (
        Event as Event,
    )
    from trainbus.eventloop import (
        GlobalBatchSampler as GlobalBatchSampler,
    )
    from trainbus.eventloop import (
        Hook as Hook,
    )
    from trainbus.eventloop import (
        Metric as Metric,
    )
    from trainbus.eventloop import (
        Priority as Priority,
    )
    from trainbus.eventloop import (
        Progress as Progress,
    )
    from trainbus.eventloop import (
        Run as Run,
    )
    from trainbus.eventloop import (
        SeededDataset as SeededDataset,
    )
    from trainbus.eventloop import (
        Stream as Stream,
    )
    from trainbus.eventloop import (
        Subscription as Subscription,
    )
    from trainbus.eventloop import (
        TrainLoop as TrainLoop,
    )
    from trainbus.eventloop import (
        Update as Update,
    )
    from trainbus.eventloop import (
        Watch as Watch,
    )
    from trainbus.eventloop import (
        check_options as check_options,
    )
    from trainbus.eventloop import (
        from_json as from_json,
    )
    from trainbus.eventloop import (
        from_msgpack as from_msgpack,
    )
    from trainbus.eventloop import (
        get_logger as get_logger,
    )
    from trainbus.eventloop import (
        load_weights as load_weights,
    )
    from trainbus.eventloop import (
        mount as mount,
    )
    from trainbus.eventloop import (
        mount_points as mount_points,
    )
    from trainbus.eventloop import (
        register as register,
    )
    from trainbus.hooks import *  # noqa: F403
    from trainbus.observe import Alert as Alert
    from trainbus.observe import AlertHook as AlertHook
    from trainbus.observe import Dashboard as Dashboard
    from trainbus.observe import RunRecordHook as RunRecordHook
    from trainbus.observe import TraceHook as TraceHook

    __version__: str

_PARTS = ("eventloop", "hooks")
for _part in _PARTS:
    if not (_folder := Path(__file__).with_name(_part)).is_dir():
        raise ImportError(
            f"{_folder} is no folder: this checkout was made without symbolic links. Make it again with "
            "`git -c core.symlinks=true clone`, or install the wheel"
        )
_PUBLIC = ("trainbus.eventloop", "trainbus.hooks")
_ELSEWHERE = ("trainbus.events", "trainbus.errors", "trainbus.media")
"""Modules with public names of their own, which this one has not."""
_AROUND = {
    "TrainbusCheckpointIO": "trainbus.bridges",
    "Alert": "trainbus.observe",
    "AlertHook": "trainbus.observe",
    "Dashboard": "trainbus.observe",
    "RayTrainHook": "trainbus.bridges.ray",
    "RunRecordHook": "trainbus.observe",
    "TraceHook": "trainbus.observe",
    "TransformersHook": "trainbus.compat",
    "add_hooks": "trainbus.config",
    "attach": "trainbus.bridges",
}
"""Names of the parts around the engine and the hooks, and their modules."""
_OPTIONAL = {
    "TrainbusCheckpointManager": ("trainbus.bridges.torchtitan.manager", "torchtitan"),
    "TrainbusSaver": ("trainbus.bridges.ignite.saver", "ignite"),
}
"""Names that need another library: their modules, and the library. ``from trainbus import *`` leaves them out."""


def main() -> int:
    """Run the command line; return its exit status."""
    try:
        from trainbus.cli import main as command
    except KeyboardInterrupt:  # while modules were being imported
        return 130
    return command()


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        return globals().setdefault(name, _find(name))

    def __dir__() -> list[str]:
        there = [name for name, (_, library) in _OPTIONAL.items() if find_spec(library)]  # help() loads each name
        return sorted(["__version__", "errors", "events", "media", *_PARTS, *there, *_public()])


def _find(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("trainbus")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            return "0+unknown"
    if name == "__all__":
        return _public()
    if not name.startswith("_") and find_spec(f"trainbus.{name}"):
        return importlib.import_module(f"trainbus.{name}")
    if name in _OPTIONAL:
        return getattr(importlib.import_module(_OPTIONAL[name][0]), name)
    if name in _AROUND:
        return getattr(importlib.import_module(_AROUND[name]), name)
    if name in _public():
        return next(getattr(one, name) for one in map(importlib.import_module, _PUBLIC) if name in one.__all__)
    elsewhere = _elsewhere()
    if name in elsewhere:
        raise AttributeError(f"module 'trainbus' has no attribute {name!r}: it is in {elsewhere[name]}")
    known = [] if name.startswith("_") else [*_public(), *elsewhere]
    hint = importlib.import_module("trainbus.eventloop.spelling").did_you_mean(name, known)
    raise AttributeError(f"module 'trainbus' has no attribute {name!r}{hint}")


def _elsewhere() -> dict[str, str]:
    """Return the names that are public in another module, with its name; the bases of your own events are here, too."""
    modules = map(importlib.import_module, _ELSEWHERE)
    return {name: one.__name__ for one in modules for name in one.__all__ if name not in ("Event", "Progress")}


def _public() -> list[str]:
    names = [name for package in map(importlib.import_module, _PUBLIC) for name in package.__all__]
    return list(dict.fromkeys([*_AROUND, *(name for name in names if name not in _elsewhere())]))
