"""Handlers and functions that fail, and what they say."""

from collections.abc import Callable
from typing import Any

import pytest

from trainbus.eventloop import ConfigurationError


def fails(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is given."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def said(function: Callable[..., object], *arguments: object, error: Any = ConfigurationError, **options: object) -> str:
    """Return the text of the error that a function raises."""
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)
