"""The options of the lane of an offloaded handler, checked, and the lane that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from eventloop.errors import SubscribeError
from eventloop.offload import FULL, Full, Lane, SizedLane, check_capture, detacher


class LaneOptions(msgspec.Struct, frozen=True):
    """What somebody asked for; None where nothing was said. See :class:`eventloop.HandlerOptions`."""

    capture: Callable[[Any], Any] | None = None
    queue: int | None = None
    full: Full | None = None
    linger: float | None = None
    max_bytes: int | None = None
    timeout: float | None = None
    batch: int | None = None

    def refuse(self) -> None:
        """Raise SubscribeError if there is any: the handler runs inline."""
        for name in self.__struct_fields__:
            if getattr(self, name) is not None:
                raise SubscribeError(
                    f"{name}= is for offloaded handlers, and this one is a plain function that runs inline; "
                    'add offload="thread", or make it async'
                )

    def make(self, label: str) -> Lane:
        """Return the lane, after checking the options.

        Args:
            label: of the subscription, for errors.

        Raises:
            SubscribeError: an option that cannot work; says which, and what would.
        """
        self._check()
        places: dict[str, Any] = {
            "capacity": 1024 if self.queue is None else self.queue,
            "full": self.full or "block",
            "linger": 0.01 if self.linger is None else self.linger,
        }
        if self.capture is not None:
            return SizedLane(label, self.capture, max_bytes=self.max_bytes, **places)
        return Lane(label, detacher(), **places)

    def _check(self) -> None:
        for name, number in (("queue", self.queue), ("batch", self.batch)):
            if number is not None and not _is_count(number):
                raise SubscribeError(f"{name}={number!r}: give a positive number of events")
        if self.full is not None and self.full not in FULL:
            raise SubscribeError(f"full={self.full!r}: a full lane can {', '.join(map(repr, FULL))}")
        if self.linger is not None and not (_is_number(self.linger) and 0 <= self.linger <= 60):
            raise SubscribeError(f"linger={self.linger!r}: give seconds between 0 and 60")
        if self.timeout is not None and not (_is_number(self.timeout) and 0 < self.timeout < 1e6):
            raise SubscribeError(f"timeout={self.timeout!r}: give the seconds after which a call of the handler has failed")
        if self.max_bytes is not None and not _is_count(self.max_bytes):
            raise SubscribeError(f"max_bytes={self.max_bytes!r}: give a positive number of bytes")
        if self.capture is not None:
            check_capture(self.capture)
        elif self.max_bytes is not None:
            raise SubscribeError("max_bytes= counts the tensors that capture= picks; for events without, queue= is the bound")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
