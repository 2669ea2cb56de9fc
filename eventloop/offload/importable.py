"""Refer to a handler by its name: a worker process imports it, and gets no object of this process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from trainbus.eventloop.errors import SubscribeError, WorkerDiedError

_MISSING = object()
_WAY_OUT = 'Define it with `def` at the top level of a module that can be imported, or use offload="thread"'


class Importable(msgspec.Struct, frozen=True):
    """A module-level function (or a static method of a module-level class)."""

    module: str
    qualname: str
    file: str | None

    def load(self) -> Callable[[Any], object]:
        """Import the module and return the function."""
        found: Callable[[Any], object] = attrgetter(self.qualname)(load(self.module, self.file))
        return found

    def check(self, handler: Callable[..., Any]) -> None:
        """Raise WorkerDiedError unless the name leads to ``handler`` (a decorator runs before the name is bound)."""
        found = _bound(self.module, self.qualname)
        if found is not handler:
            what = "nothing" if found is _MISSING else f"another object, {found!r}"
            raise WorkerDiedError(
                f"a worker process imports its handler by name, and {self.module}.{self.qualname} is {what}. {_WAY_OUT}",
                started=False,
            )


def importable_of(handler: Callable[..., Any]) -> Importable:
    """Return the name by which a worker process finds ``handler``.

    Raises:
        SubscribeError: it is a lambda, a function in a function, a method, or a function of an interactive session.
    """
    qualname = getattr(handler, "__qualname__", "")
    module = getattr(handler, "__module__", None) or ""
    is_method = inspect.ismethod(handler) or not isinstance(getattr(handler, "__self__", None), ModuleType | None)
    found = _bound(module, qualname)
    differs = found is not handler and found is not _MISSING  # missing: this is its decorator, and its name is not bound yet
    refusals = [
        (isinstance(handler, functools.partial), "a functools.partial holds arguments of this process"),
        (is_method, "a method is bound to an object of this process"),
        (not qualname or isinstance(handler, type), f"a {type(handler).__name__} object is not a function"),
        ("<lambda>" in qualname, "a lambda has no name"),
        ("<locals>" in qualname, "a function defined in a function cannot be imported"),
        (module == "__main__" and not _main_can_be_imported(), "a function of an interactive session cannot be imported"),
        (module not in sys.modules, f"its __module__ {module!r} is not a module"),
        (differs, f"its name leads to another object: {module}.{qualname} is {found!r}"),
    ]
    for applies, why in refusals:
        if applies:
            way_out = 'Make it a @staticmethod, or use offload="thread"' if is_method else _WAY_OUT
            raise SubscribeError(f'offload="process" imports its handler by name in another process, and {why}. {way_out}')
    return Importable(module, qualname, file_of(module))


@functools.cache
def file_of(module: str) -> str | None:
    """Return the file of a module that was imported."""
    file = getattr(sys.modules[module], "__file__", None)
    return None if file is None else str(Path(file).absolute())


def load(name: str, file: str | None) -> ModuleType:
    """Import a module by name, else from its file: only an importer of the first process may find the name (pytest's)."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this one imports is missing: that is its own error.
        if file is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _bound(module: str, qualname: str) -> object:
    try:
        return attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return _MISSING


def _main_can_be_imported() -> bool:
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    return Path(getattr(main, "__file__", None) or "/").is_file()
