"""Find objects by name: the parts around the engine, an object of a module, and the kind of an object of another library."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

K = TypeVar("K")


@cache
def load_builtin(part: str = "") -> None:
    """Import the parts of trainbus around this package, or one of them, which register what they have.

    By the entry points of the distribution, because this package must not import them.
    """
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):  # a checkout that is not installed
        for point in metadata.distribution("trainbus").entry_points.select(group="trainbus"):
            if part in ("", point.name):
                try:
                    part_found = point.load()
                    for name in getattr(part_found, "__all__", ()):  # a package loads its names when they are used
                        getattr(part_found, name)
                except ModuleNotFoundError as error:
                    if not f"{point.module}.".startswith(f"{error.name}."):  # else this part is not there
                        raise


def load_object(path: str) -> Any:
    """Import ``module:attribute``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def kind_of(cls: type, kinds: Mapping[str, K]) -> K | None:
    """Return the kind that is registered under the full name of a class or of a base of it, nearest first."""
    load_builtin()
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((kinds[name] for name in names if name in kinds), None)
