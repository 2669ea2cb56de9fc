"""The names that wrappers of modules put before the keys of a ``state_dict``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

_NAMES: Final = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod)\.")


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map names to themselves without ``module.`` (DataParallel's) and ``_orig_mod.`` (torch.compile's), wherever they are."""
    return {name: _NAMES.sub("", name) for name in names}


_INNER: Final = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile's
}


def unwrapped(model: Any) -> Any:
    """Return the module inside the wrappers around it, however many there are; by the names of their classes."""
    inner = [_INNER[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _INNER]
    return unwrapped(getattr(model, inner[0])) if inner else model
