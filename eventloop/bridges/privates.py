"""Check the undocumented names of a library that a bridge uses. Each bridge lists its own in its ``privates.py``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from eventloop.errors import ConfigurationError

Names = Mapping[str, tuple[str, str]]
"""Paths such as ``trainer.strategy._checkpoint_io``; for each, where it is used, and the versions that it was seen in."""


def check_names(library: str, package: str, names: Names, /, **roots: Any) -> None:
    """Look up all names, each from the root with which its path begins.

    Args:
        library: name of the library for ``pip install``.
        package: name of its top-level package.
        names: the names.
        roots: objects by the first part of the paths.

    Raises:
        ConfigurationError: the installed version lacks a name.
    """
    for path, (used, seen) in names.items():
        root, *parts = path.split(".")
        found = roots[root]
        try:
            for part in parts:
                found = getattr(found, part)
        except AttributeError as error:
            raise ConfigurationError(
                f"{library} {import_module(package).__version__} has no {path} ({type(found).__name__} lacks {part!r}), which "
                f"trainbus needs ({used}); it was seen in {seen}: pip install '{library}=={seen}', or a newer trainbus"
            ) from error
