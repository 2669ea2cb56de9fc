"""Load the hooks that come with trainbus, when a name or an object of theirs is asked for."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import metadata


@cache
def load_builtin() -> None:
    """Import the hooks of trainbus by the entry point of its own distribution: this package must not know them."""
    with suppress(metadata.PackageNotFoundError):  # a checkout that is not installed
        for point in metadata.distribution("trainbus").entry_points.select(group="trainbus"):
            point.load()
