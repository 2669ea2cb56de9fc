"""The undocumented names of Accelerate that this bridge uses."""

from __future__ import annotations

from typing import Any, Final

from trainbus.eventloop.privates import Names, check_names

NAMES: Final[Names] = {
    "accelerator.project_configuration.save_on_each_node": ("host.py: refuse several ranks that write", "1.10.0 to 1.15.0"),
    "accelerator.project_configuration.automatic_checkpoint_naming": ("host.py: the names of folders", "1.10.0 to 1.15.0"),
    "accelerator.project_configuration.total_limit": ("host.py: remove older folders", "1.10.0 to 1.15.0"),
    "accelerator.project_dir": ("host.py: the directory of folders", "1.10.0 to 1.15.0"),
    "accelerator.save_iteration": ("host.py: the number of the next folder", "1.10.0 to 1.15.0"),
}


def check(accelerator: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("accelerate", "accelerate", NAMES, accelerator=accelerator)


_ENTRY: Final[Names] = {
    "accelerator._custom_objects": ("entry.py: what register_for_checkpointing() was given", "1.10.0 to 1.15.0"),
}


def custom_objects_of(accelerator: Any) -> list[Any]:
    """Return the objects that an ``accelerate.Accelerator`` saves beside models and optimizers."""
    check_names("accelerate", "accelerate", _ENTRY, accelerator=accelerator)
    found: list[Any] = accelerator._custom_objects
    return found
