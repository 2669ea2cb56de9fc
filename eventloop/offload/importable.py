"""Check whether a handler can run in a worker process, which imports it by its name: it gets no object of this process."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from trainbus.eventloop.errors import SubscribeError

_MISSING = object()
_WAY_OUT = 'Define it with `def` at the top level of a module that can be imported, or use offload="thread"'


def check_importable(handler: Callable[..., Any]) -> None:
    """Raise SubscribeError for a lambda, a function in a function, a method, or a function of an interactive session."""
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


def check_not_daemonic(label: str) -> None:
    """Raise SubscribeError if this process may not start another one."""
    if (here := multiprocessing.current_process()).daemon:
        raise SubscribeError(
            f'offload="process" of {label}: a daemonic process ({here.name}, as of a Pool) may not start others. Give '
            'offload="thread", or train in a process that is not daemonic, such as one of '
            "concurrent.futures.ProcessPoolExecutor"
        )


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
