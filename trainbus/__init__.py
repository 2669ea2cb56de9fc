"""The public names of trainbus, loaded on first use: those of the engine (``trainbus.eventloop``), mount points, and hooks.

``python -m trainbus`` runs the command ``trainbus``; ``torchrun -m trainbus run`` does so in several processes.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainbus.bridges import TrainbusCheckpointIO as TrainbusCheckpointIO
    from trainbus.bridges import attach as attach
    from trainbus.bridges.ignite.saver import TrainbusSaver as TrainbusSaver
    from trainbus.bridges.ray import RayTrainHook as RayTrainHook
    from trainbus.compat import TransformersHook as TransformersHook
    from trainbus.config import add_hooks as add_hooks
    from trainbus.eventloop import *  # noqa: F403
    from trainbus.eventloop.events import *  # noqa: F403
    from trainbus.eventloop.events.mount_points import *  # noqa: F403
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
_PUBLIC = ("trainbus.eventloop", "trainbus.eventloop.events", "trainbus.hooks")
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
_OPTIONAL = {"TrainbusSaver": ("trainbus.bridges.ignite.saver", "ignite")}
"""Names that need another library: their modules, and the library. ``from trainbus import *`` leaves them out."""


def main() -> int:
    """Run the command line; return its exit status."""
    try:
        from trainbus.cli import main as command
    except KeyboardInterrupt:  # while torch was being imported
        return 130
    return command()


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        return globals().setdefault(name, _find(name))

    def __dir__() -> list[str]:
        there = [name for name, (_, library) in _OPTIONAL.items() if find_spec(library)]  # help() loads each name
        return sorted(["__version__", *_PARTS, *there, *_public()])


def _find(name: str) -> Any:
    if name == "__version__":
        try:
            return metadata.version("trainbus")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            return "0+unknown"
    if name == "__all__":
        return _public()
    if name in _PARTS:
        return importlib.import_module(f"trainbus.{name}")
    if name in _OPTIONAL:
        return getattr(importlib.import_module(_OPTIONAL[name][0]), name)
    if name in _AROUND:
        return getattr(importlib.import_module(_AROUND[name]), name)
    if not name.startswith("_"):
        for package in map(importlib.import_module, _PUBLIC):
            if name in package.__all__:
                return getattr(package, name)
    hint = "" if name.startswith("_") else importlib.import_module("trainbus.eventloop.spelling").did_you_mean(name, _public())
    raise AttributeError(f"module 'trainbus' has no attribute {name!r}{hint}")


def _public() -> list[str]:
    packages = map(importlib.import_module, _PUBLIC)
    return list(dict.fromkeys([*_AROUND, *(name for package in packages for name in package.__all__)]))
