"""The undocumented names of Lightning that this bridge and ``TrainbusCheckpointIO`` use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

from trainbus.eventloop.privates import Names, check_names
from trainbus.eventloop.user_errors import contextmanager

NAMES: Final[Names] = {
    "trainer.strategy.launcher": ("host.py: refuse strategies that start processes", "2.5.0 to 2.6.6"),
    "trainer.strategy._checkpoint_io": ("saver.py: the plugin of a trainer", "2.5.0 to 2.6.6"),
    "trainer.fit_loop._data_fetcher": ("iterations.py: steps that fetch their batches", "2.5.0 to 2.6.6"),
    "trainer.fit_loop.epoch_loop.batch_progress": ("host.py, iterations.py: counts, and the last batch", "2.5.0 to 2.6.6"),
    "package.loops.fetchers._DataLoaderIterDataFetcher": ("iterations.py: steps that fetch their batches", "2.5.0 to 2.6.6"),
    "package.strategies.launchers.multiprocessing._MultiProcessingLauncher": (
        "host.py: refuse strategies that start processes",
        "2.5.0 to 2.6.6",
    ),
}
"""Checked when a trainer is attached."""
PLUGIN_NAMES: Final[Names] = {
    "strategy._checkpoint_io": ("saver.py: the plugin of a trainer", "2.5.0 to 2.6.6"),
    "callback._fs": ("saver.py: find files that are being written", "2.5.0 to 2.6.6"),
    "callback._link_checkpoint": ("saver.py: links to files that are being written", "2.5.0 to 2.6.6"),
}
"""Checked when a plugin is made."""


def check(trainer: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name that the bridge needs."""
    modules = (base.__module__ for base in type(trainer).__mro__ if base.__name__ == "Trainer")
    name = next(one for one in modules if one.endswith(".trainer.trainer")).removesuffix(".trainer.trainer")
    check_names(*_library(name), NAMES, trainer=trainer, package=import_module(name))


def check_plugin(name: str) -> None:
    """Raise ConfigurationError if the installed version of a Lightning package lacks a name that the plugin needs."""
    strategy = import_module(f"{name}.strategies").SingleDeviceStrategy()
    callback = import_module(f"{name}.callbacks").ModelCheckpoint()
    check_names(*_library(name), PLUGIN_NAMES, strategy=strategy, callback=callback)


def _library(name: str) -> tuple[str, str]:
    package = name.partition(".")[0]
    return package.replace("_", "-"), package


def starts_processes(strategy: Any) -> bool:
    """Return True if a strategy starts its processes from this one."""
    return any(base.__name__ == "_MultiProcessingLauncher" for base in type(strategy.launcher).__mro__)


def step_fetches(trainer: Any) -> bool:
    """Return True if the module's ``training_step(dataloader_iter)`` takes its batches from the iterator itself."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


def checkpoint_io(trainer: Any) -> Any:
    """Return the CheckpointIO of a trainer; the property raises in some strategies, and creates a plugin."""
    return trainer.strategy._checkpoint_io


@contextmanager
def files_seen(callback: Any, around: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the file system of a ModelCheckpoint in a block by ``around(file system)``."""
    files = callback._fs
    callback._fs = around(files)
    try:
        yield
    finally:
        callback._fs = files


def replace_link(model_checkpoint: Any, around: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[[], None]:
    """Replace the function by which the class ModelCheckpoint links a file; return what restores it."""
    original = model_checkpoint._link_checkpoint
    model_checkpoint._link_checkpoint = staticmethod(around(original))
    return lambda: setattr(model_checkpoint, "_link_checkpoint", staticmethod(original))
