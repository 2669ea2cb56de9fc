"""Load the names of a package when they are used (PEP 562), so that a part of it does not import the rest.

The package imports its names under ``if TYPE_CHECKING:``, where type checkers and the pages of the reference find them. That
block is also the table of where they are:

    if TYPE_CHECKING:
        from trainbus.eventloop.bus.bus import Bus
    else:
        __getattr__, __dir__ = lazy(__name__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package. Its submodules, too, load on first use."""
    module = sys.modules[package]

    @cache
    def homes() -> dict[str, str]:
        spec: Any = module.__spec__
        tree = ast.parse(spec.loader.get_source(package))
        guarded = (one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")
        imports = (one for block in guarded for one in block.body if isinstance(one, ast.ImportFrom))
        return {alias.name: str(one.module) for one in imports for alias in one.names}

    def get(name: str) -> Any:
        if name in homes():
            value = getattr(import_module(homes()[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")  # which sets the attribute
        else:  # with both, Python names the nearest one of dir() in a traceback
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes()})
