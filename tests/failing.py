"""Handlers and functions that fail."""

from collections.abc import Callable
from typing import Any


def fails(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is given."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
