"""Copies of hooks and writers (``copy``, ``pickle``): they have the options of the original, and belong to no run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar


class CopiedAnew:
    """Base of classes with attributes that belong to one run or process, such as locks, open files and threads."""

    of_run: ClassVar[Mapping[str, Callable[[], object] | None]] = {}
    """For each such attribute, what makes its first value in a copy; None for an attribute that a run makes."""

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in self.of_run}
        # A shallow copy, too, has parts of its own.
        return {name: copy(value) if isinstance(value, CopiedAnew) else value for name, value in kept.items()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        for name, make in self.of_run.items():
            if make is not None:
                setattr(self, name, make())
