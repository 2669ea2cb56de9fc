"""Priorities: lower runs first, equal numbers run in order of registration."""

from __future__ import annotations

from difflib import get_close_matches
from enum import IntEnum

from eventloop.errors import SubscribeError


class Priority(IntEnum):
    """Named slots on the scale 0–100; the names and numbers are MMEngine's.

    Anywhere a priority is taken, a member, its name in any case (``"above_normal"``) or an integer from 0 to 100 will do.
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
    def parse(cls, value: PriorityLike) -> int:
        """Return ``value`` as an integer from 0 to 100.

        Raises:
            SubscribeError: an unknown name, a number outside 0–100, or another type.
        """
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise SubscribeError(
                f"priority={value!r}: a priority is an integer from 0 to 100 or one of {', '.join(cls.__members__)}, "
                f"not {type(value).__name__}"
            )
        if isinstance(value, str):
            return cls._from_name(value, {name: int(member) for name, member in cls.__members__.items()})
        if not 0 <= value <= 100:
            raise SubscribeError(f"priority={value}: priorities go from 0 (runs first) to 100 (runs last)")
        return int(value)

    @classmethod
    def imix(cls, name: str) -> int:
        """Return the number of one of iMIX's seven level names (``"HIGHER"``, ``"LOWER"`` …), any case.

        iMIX spaces its names differently (its NORMAL is 30), so they have an entry of their own and are never guessed.

        Raises:
            SubscribeError: the name is none of iMIX's.
        """
        return cls._from_name(name, _IMIX)

    @classmethod
    def label(cls, value: int) -> str:
        """Return the name of ``value``, or that of the named slot before it with a distance: ``"NORMAL+5"``."""
        below = max(member for member in cls if member <= value)
        return below.name if below == value else f"{below.name}+{value - below}"

    @staticmethod
    def _from_name(name: str, table: dict[str, int]) -> int:
        try:
            return table[name.strip().upper()]
        except KeyError:
            near = get_close_matches(name.upper(), table, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise SubscribeError(
                f"priority={name!r} is not a priority name{hint}; use an integer from 0 to 100 or one of {', '.join(table)}"
            ) from None


PriorityLike = int | str

_IMIX = {"HIGHEST": 0, "HIGHER": 10, "HIGH": 20, "NORMAL": 30, "LOW": 40, "LOWER": 50, "LOWEST": 60}
