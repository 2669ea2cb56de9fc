"""Load trainbus's hooks when one of their names or objects is needed."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import metadata


@cache
def load_builtin() -> None:
    """Import trainbus's hooks by the entry point of the distribution, because this package must not import them."""
    with suppress(metadata.PackageNotFoundError):  # a checkout that is not installed
        for point in metadata.distribution("trainbus").entry_points.select(group="trainbus"):
            point.load()
