"""The names that wrappers of modules put before the keys of a ``state_dict``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NAMES: Final = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod)\.")


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map names to themselves without ``module.`` (DataParallel's) and ``_orig_mod.`` (torch.compile's), wherever they are."""
    names = list(names)
    if not any("module." in name or "_orig_mod." in name for name in names):  # the usual case: no regular expressions
        return dict(zip(names, names, strict=True))
    return {name: _NAMES.sub("", name) for name in names}
