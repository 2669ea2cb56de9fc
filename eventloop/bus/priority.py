"""Priorities: lower runs first, equal numbers run in order of registration."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from trainbus.eventloop.checks import check_value
from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.spelling import did_you_mean


class Priority(IntEnum):
    """Named slots on the scale 0–100.

    A ``priority=`` takes a member, its name in any case (``"above_normal"``), or an integer from 0 to 100.
    """

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100

    @classmethod
    def parse(cls, value: PriorityLike, names: Mapping[str, int] | None = None) -> int:
        """Return ``value`` as an integer from 0 to 100; raise SubscribeError for any other name or number.

        ``names`` replaces the names of this scale (in capitals) and their numbers.
        """
        table = cls.__members__ if names is None else names
        if isinstance(value, str):
            named = table.get(value.strip().upper())
            if named is None:
                advice = f"use an integer from 0 to 100 or one of {', '.join(table)}"
                raise SubscribeError(f"priority={value!r} is not a priority name{did_you_mean(value, table, most=1)}; {advice}")
            return int(named)
        number = int(value) if isinstance(value, IntEnum) else value
        words = f"an integer from 0 (runs first) to 100 (runs last), or one of {', '.join(table)}"
        check_value("priority", number, Annotated[int, Meta(ge=0, le=100, description=words)], SubscribeError)
        return number

    @classmethod
    def label(cls, value: int) -> str:
        """Return the name of ``value``, or the nearest lower name with the difference: ``"NORMAL+5"``."""
        below = max(member for member in cls if member <= value)
        return below.name if below == value else f"{below.name}+{value - below}"


PriorityLike = int | str
