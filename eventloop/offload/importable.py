"""A handler by its name: a worker process imports it, and gets no object of this process."""

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

from eventloop.errors import SubscribeError, WorkerDiedError

_MISSING = object()
_WAY_OUT = 'Define it with `def` at the top level of a module that can be imported, or use offload="thread"'


class Origin(msgspec.Struct, frozen=True):
    """A module: its name, and its file in case only an importer of this process finds the name (pytest's)."""

    module: str
    file: str | None = None


class Importable(msgspec.Struct, frozen=True):
    """A module-level function (or a static method of a module-level class)."""

    origin: Origin
    qualname: str

    def load(self) -> Callable[[Any], object]:
        """Import the module and return the function."""
        found: Callable[[Any], object] = attrgetter(self.qualname)(load(self.origin))
        return found

    def check(self, handler: Callable[..., Any]) -> None:
        """Raise WorkerDiedError unless the name leads to ``handler`` (a decorator runs before the name is bound)."""
        found = _bound(self.origin.module, self.qualname)
        if found is not handler:
            what = "nothing" if found is _MISSING else f"another object, {found!r}"
            raise WorkerDiedError(
                f"a worker process imports its handler by name, and {self.origin.module}.{self.qualname} is {what}. {_WAY_OUT}",
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
        (module not in sys.modules, f"a function says that it is of {module!r}, which is not a module"),
        (differs, f"a function is not what its name leads to: {module}.{qualname} is {found!r}"),
    ]
    for applies, why in refusals:
        if applies:
            way_out = 'Make it a @staticmethod, or use offload="thread"' if is_method else _WAY_OUT
            raise SubscribeError(f'offload="process" imports its handler by name in another process, and {why}. {way_out}')
    return Importable(origin_of(module), qualname)


@functools.cache
def origin_of(module: str) -> Origin:
    """Return where ``module`` comes from."""
    file = getattr(sys.modules[module], "__file__", None)
    return Origin(module, None if file is None else str(Path(file).absolute()))


def load(origin: Origin) -> ModuleType:
    """Import a module by name, else from its file."""
    try:
        return importlib.import_module(origin.module)
    except ModuleNotFoundError as error:
        # A module that this one imports is missing: that is its own error.
        if origin.file is None or not (origin.module == error.name or origin.module.startswith(f"{error.name}.")):
            raise
        spec = importlib.util.spec_from_file_location(origin.module, origin.file)
        if spec is None or spec.loader is None:
            raise
        module = sys.modules[origin.module] = importlib.util.module_from_spec(spec)
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
