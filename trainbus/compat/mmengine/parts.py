"""The parts of MMEngine's runner that its hooks use, made from a run and its configuration."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from mmengine.config import Config
from mmengine.dist import broadcast, is_distributed
from mmengine.fileio import LocalBackend, get_file_backend, register_backend
from mmengine.logging import MessageHub, MMLogger
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import LOG_PROCESSORS, PARAM_SCHEDULERS, VISUALIZERS
from mmengine.runner import LogProcessor
from mmengine.visualization import Visualizer

from trainbus.eventloop.checkpoint import commit_bytes

_KEYS: Final = ("filename", "text", "env_variables")  # keys that MMEngine's Config reserves


class SteppedByRun(OptimWrapper):  # type: ignore[misc]  # it has no types
    """A wrapper of an optimizer that the run steps. MMEngine's schedulers count the steps of the wrapper itself."""

    @property
    def _global_step(self) -> int:
        return 0

    @_global_step.setter
    def _global_step(self, value: int) -> None:
        """Ignore the step count that a scheduler sets, because it would warn of a schedule before the first step."""


def optim_wrapper(optimizers: Mapping[str, torch.optim.Optimizer]) -> Any:
    """Return MMEngine's wrapper of one optimizer, or of several by name."""
    wrapped = {name: SteppedByRun(optimizer) for name, optimizer in optimizers.items()}
    return next(iter(wrapped.values())) if len(wrapped) == 1 else OptimWrapperDict(**wrapped)


def by_name(optimizers: Iterable[str], wrapper: Any) -> dict[str, Any]:
    """Return the wrapper of each optimizer."""
    return dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else dict.fromkeys(optimizers, wrapper)


def param_schedulers(described: Any, wrapper: Any, *, epoch_length: int | None, max_epochs: int, max_iters: int) -> Any:
    """Return the schedulers that a configuration describes: a list, or a list for each of several optimizers."""

    def make(one: Any, wrapper: Any) -> Any:
        if not isinstance(one, Mapping):
            return one
        end = max_epochs if one.get("by_epoch", True) else max_iters
        return PARAM_SCHEDULERS.build(
            {"end": end, **copy.deepcopy(dict(one))}, default_args={"optimizer": wrapper, "epoch_length": epoch_length}
        )

    def make_all(some: Any, wrapper: Any) -> list[Any]:
        return [make(one, wrapper) for one in (some if isinstance(some, Sequence) else [some])]

    if not isinstance(wrapper, OptimWrapperDict):
        return make_all(described, wrapper)
    named = isinstance(described, Mapping) and "type" not in described
    return {name: make_all(described[name] if named else described, one) for name, one in wrapper.items()}


def config(given: Mapping[str, Any]) -> Any:
    """Return the configuration of a run as MMEngine's ``Config``; objects in it become their names."""
    return Config({str(key): _plain(value) for key, value in given.items() if key not in _KEYS})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def timestamp() -> str:
    """Return the time that names the files of a run, the same on all ranks."""
    now = torch.tensor(time.time(), dtype=torch.float64)
    if is_distributed():
        broadcast(now)
    return time.strftime("%Y%m%d_%H%M%S", time.localtime(now.item()))


def unused_name(name: str) -> str:
    """Return an unused name for a message hub, because two runs may begin in the same second."""
    found, number = name, 0
    while MessageHub.check_instance_created(found):
        number += 1
        found = f"{name}_{number}"
    return found


def logger(name: str, directory: str, file: str, level: int | str) -> Any:
    """Return MMEngine's logger, which writes to the console and to a file."""
    # First, because MMEngine would keep its lock after an error.
    Path(directory).mkdir(parents=True, exist_ok=True)
    return MMLogger.get_instance(name, log_file=str(Path(directory, file)), log_level=level, file_mode="a")


def visualizer(described: Any, name: str, directory: str) -> Any:
    """Return MMEngine's visualizer, by default one that writes files in ``directory``."""
    if isinstance(described, Mapping):
        return VISUALIZERS.build({"name": name, "save_dir": directory, **copy.deepcopy(dict(described))})
    if described is not None:
        return described
    return Visualizer.get_instance(name, vis_backends=[{"type": "LocalVisBackend"}], save_dir=directory)


def log_processor(described: Any, *, by_epoch: bool) -> Any:
    """Return MMEngine's log processor; ``by_epoch`` by default as the training is."""
    if described is not None and not isinstance(described, Mapping):
        return described
    options = {"by_epoch": by_epoch, **copy.deepcopy(dict(described or {}))}
    return LOG_PROCESSORS.build(options) if "type" in options else LogProcessor(**options)


class _Committing(LocalBackend):  # type: ignore[misc]
    """MMEngine's local files, each written under a temporary name, made durable and renamed."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        commit_bytes(Path(filepath), bytes(obj))


_COMMITTING: Final = "trainbus"
register_backend(_COMMITTING, _Committing, force=True)


def backend_for(directory: str) -> dict[str, str] | None:
    """Return the file backend for checkpoints in a directory; None for MMEngine's own, if it is elsewhere."""
    return {"backend": _COMMITTING} if isinstance(get_file_backend(directory), LocalBackend) else None
