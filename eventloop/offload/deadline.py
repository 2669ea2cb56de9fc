"""How long somebody is going to wait."""

from __future__ import annotations

import math
import time


class Deadline:
    """A moment until which somebody waits; another thread may move it nearer meanwhile.

    Args:
        seconds: from now on; None waits for as long as it takes.
    """

    def __init__(self, seconds: float | None) -> None:
        self._at = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never below 0; infinity if it waits for ever."""
        return max(0.0, self._at - time.monotonic())

    def shorten(self, seconds: float) -> None:
        """Wait for at most ``seconds`` from now on."""
        self._at = min(self._at, time.monotonic() + seconds)
