"""One module per trainer, with the code that its users write to train the jobs of `savers` and `bridges`.

A module may define any of

- ``SAVERS = {name: way}``: ways to save while it trains (see ``Way``); those with trainbus begin with its name;
- ``train_with(job, callback=False, bus=None)``: train alone, with an empty callback, or with a bus; without the parameter
  ``callback`` if the trainer has no callbacks.

Modules import their library at the top. A library that is not installed is reported and left out.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.save_job import SaveJob

TRAINERS = {
    "own_loop": "own loop",
    "lightning": "Lightning",
    "transformers": "Hugging Face",
    "accelerate": "Accelerate",
    "ignite": "Ignite",
}


@dataclass(frozen=True)
class Way:
    """One way to save checkpoints at regular steps, and to keep the newest one."""

    train: Callable[["SaveJob"], object]
    """Train with a checkpoint of weights and optimizer after every ``job.interval`` steps."""
    path: str
    """The complete checkpoint, a file or a directory, with ``{step}`` and, counted from 0, its ``{number}``.

    A save in the background gives it this name when it is complete, and not before.
    """
    read: Callable[[Path], Mapping[str, Tensor]]
    """The weights in it, by the names of the model's parameters."""


def load() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Import the modules; return them by the trainer's title, and the reasons for those left out."""
    modules, left_out = {}, {}
    for name, title in TRAINERS.items():
        try:
            modules[title] = importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            left_out[title] = str(error)
    return modules, left_out
