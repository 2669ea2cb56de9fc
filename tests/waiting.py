"""Tests wait for conditions, never for times."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition does not come about"
        time.sleep(0.005)
