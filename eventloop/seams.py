"""Limits, pauses and clocks that no option sets: they stand in the module that needs them, and tests change them there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from trainbus.eventloop.user_errors import contextmanager

T = TypeVar("T")


class Seam(Generic[T]):
    """A value that is the same for all users, and that a test replaces.

    INTERVAL: Final = Seam(1.0)  # seconds between two heartbeats

    Read ``value`` at each use.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def replaced(self, value: T) -> Iterator[None]:
        """Have another value for a while."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


CLOCK: Final[Seam[Callable[[], float]]] = Seam(time.monotonic)
"""The clock of measurements and pauses, in seconds."""
