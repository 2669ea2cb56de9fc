"""The undocumented names of Ray Train that this bridge uses. None of them begins with an underscore."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from trainbus.eventloop.privates import Names, check_names

_SEEN: Final = "2.60.0"
NAMES: Final[Names] = {
    "context.get_storage": ("worker.py: Ray's storage path of the run", _SEEN),
    "storage.experiment_fs_path": ("worker.py: likewise", _SEEN),
    "storage.storage_filesystem.type_name": ("worker.py: a folder, or a store?", _SEEN),
    "run.run_config.checkpoint_config.num_to_keep": ("folders.py: files that Ray has deleted while no worker ran", _SEEN),
    "run.run_config.checkpoint_config.checkpoint_score_attribute": ("worker.py: saves that have no score", _SEEN),
    "run.run_config.checkpoint_config.checkpoint_score_order": ("worker.py: likewise", _SEEN),
}
"""Looked up when a run with the hook is made. The first three come from Ray's own error messages and user guides."""


def check(context: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("ray[train]", "ray", {name: one for name, one in NAMES.items() if name.startswith("context.")}, context=context)
    check_names(
        "ray[train]",
        "ray",
        {name: one for name, one in NAMES.items() if not name.startswith("context.")},
        storage=context.get_storage(),
        run=_run(),
    )


def storage_of(context: Any) -> tuple[Any, str]:
    """Return the file system of ``pyarrow`` that has the files of a run, and the path of its folder there."""
    storage = context.get_storage()
    return storage.storage_filesystem, storage.experiment_fs_path


def inside(files: Any) -> Any:
    """Return the file system of fsspec that a file system of ``pyarrow`` is made from; None if it is one of its own."""
    return getattr(getattr(files, "handler", None), "fs", None)


def kept_by_ray() -> int | None:
    """Return the ``num_to_keep`` of the run; None if Ray keeps all checkpoints."""
    number: int | None = _run().run_config.checkpoint_config.num_to_keep
    return number


def score_of_ray() -> tuple[str | None, bool]:
    """Return the name of the metric by which Ray ranks checkpoints, None without one; and whether a greater one is better."""
    config = _run().run_config.checkpoint_config
    return config.checkpoint_score_attribute, config.checkpoint_score_order == "max"


def _run() -> Any:
    return import_module("ray.train.v2._internal.execution.context").get_train_context().train_run_context
