"""Which process this is, and how many there are: the only module that asks ``torch.distributed`` about all of them.

What they hold, a run asks its :class:`~trainbus.eventloop.training.distributed.layout.RankLayout`. No torch is imported here.
"""

from __future__ import annotations

import sys
from typing import Any


def is_joined() -> bool:
    """Return True if this process is one of a process group of ``torch.distributed``, which may be its only one."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def this_rank() -> int:
    """Return the rank of this process in the default process group; 0 without a group."""
    return sys.modules["torch.distributed"].get_rank() if is_joined() else 0


def world_size() -> int:
    """Return the number of processes in the default process group; 1 without a group."""
    return sys.modules["torch.distributed"].get_world_size() if is_joined() else 1
