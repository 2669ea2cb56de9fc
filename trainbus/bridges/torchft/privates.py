"""The undocumented names of torchft that this bridge uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from trainbus.eventloop.privates import Names, check_names

_SEEN: Final = "0.2.0"
NAMES: Final[Names] = {
    "manager._load_state_dict_fns": ("host.py: the state functions that a manager has", _SEEN),
    "manager._replica_id": ("host.py: the name of a replica group", _SEEN),
    "manager._quorum_future": ("lookout.py: whether the groups have found each other", _SEEN),
    "manager._group_world_size": ("host.py: the number of processes of a replica group", _SEEN),
}


_MENDED: Final = "_completed"
"""A name in the module of torchft's DistributedDataParallel since a failed allreduce does not raise; 0.2.0 lacks it."""


def check(manager: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("torchft", "torchft", NAMES, manager=manager)


def fails_with_others(module: torch.nn.Module) -> bool:
    """Return True for torchft's DistributedDataParallel of a version whose backward pass raises when another group dies."""
    kind = next((one for one in type(module).__mro__ if one.__module__ == "torchft.ddp"), None)
    is_distributed = kind is not None and kind.__name__ == "DistributedDataParallel"
    return is_distributed and not hasattr(sys.modules["torchft.ddp"], _MENDED)


def load_functions(manager: Any) -> Mapping[str, Callable[[Any], None]]:
    """Return the functions that load a state, by the key that they were registered with."""
    found: Mapping[str, Callable[[Any], None]] = manager._load_state_dict_fns
    return found


def waits_for_quorum(manager: Any) -> bool:
    """Return True while a manager asks its lighthouse for the groups of a step."""
    future = manager._quorum_future
    return future is not None and not future.done()


def replica_id(manager: Any) -> str | None:
    """Return the ``replica_id=`` of a manager."""
    found: str | None = manager._replica_id
    return found


def group_size(manager: Any) -> int:
    """Return the number of processes in the replica group of a manager."""
    found: int = manager._group_world_size
    return found
