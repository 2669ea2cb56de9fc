"""Copies of hooks and writers (``copy``, ``pickle``): they have the options of the original, and belong to no run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar


class _Module(str):
    """The name of a module in the state of a copy, because modules cannot be pickled."""

    __slots__ = ()


class CopiedAnew:
    """Base of classes with attributes that belong to one run or process, such as locks, open files and threads.

    A copy imports the modules among its attributes again.
    """

    of_run: ClassVar[Mapping[str, Callable[[], object] | None]] = {}
    """For each such attribute, what makes its first value in a copy; None for an attribute that a run makes."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _copied(value) for name, value in vars(self).items() if name not in self.of_run}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: import_module(one) if isinstance(one, _Module) else one for name, one in state.items()})
        for name, make in self.of_run.items():
            if make is not None:
                setattr(self, name, make())


def _copied(value: Any) -> Any:
    if isinstance(value, ModuleType):
        return _Module(value.__name__)
    return copy(value) if isinstance(value, CopiedAnew) else value  # a shallow copy, too, has parts of its own
