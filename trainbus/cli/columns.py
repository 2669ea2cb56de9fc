"""Columns of ``trainbus runs``: find one by name, choose rows by conditions such as ``lr<0.01``, and sort rows."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from trainbus.config.read import shortened
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.spelling import did_you_mean
from trainbus.observe.compared import Row

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION: Final = re.compile(r"\s*([^<>=!]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
_UNITS: Final = {
    "time": {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "size": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
}
_WORDS: Final = {"true": True, "false": False, "none": None, "null": None}


class Condition(NamedTuple):
    """A column as the user names it, the sign of the comparison, and the value as text."""

    name: str
    sign: str
    value: str


def parse(text: str) -> Condition:
    """Return the parts of a condition.

    Raises:
        ConfigurationError: it has no sign, or nothing on one side of it.
    """
    found = _CONDITION.fullmatch(text)
    if found is None or not found[3]:
        raise ConfigurationError(
            f"--where {shortened(text)!r} is not a condition; write a column, one of < <= = != >= > and a value, such as "
            '"lr<0.01"'
        )
    return Condition(*found.groups())


def column_named(name: str, known: Sequence[str]) -> str:
    """Return the column that a name means: the whole name, or the end of a dotted name.

    Raises:
        ConfigurationError: no column has this name, or several end with it.
    """
    if name in known:
        return name
    ends = [one for one in known if one.endswith((f".{name}", f"/{name}"))]
    if len(ends) == 1:
        return ends[0]
    if ends:
        shown = ", ".join(ends[:4]) + (f" and {len(ends) - 4} more" if len(ends) > 4 else "")
        raise ConfigurationError(f"{shortened(name)!r} is the end of several columns; give one of {shown}")
    meant = did_you_mean(name, known, most=3)
    raise ConfigurationError(
        f"no run has a column {shortened(name)!r}{meant or '; trainbus runs --json shows the columns of each run'}"
    )


def matches(condition: Condition, name: str, row: Row) -> bool:
    """Return True if a row has the column and its value fulfils the condition; without the column, only ``!=`` is true.

    Raises:
        ConfigurationError: the column has numbers, and the value is none.
    """
    if name not in row:
        return condition.sign == "!="
    own = row[name]
    wanted = _value(condition, name, own)
    if own is None or wanted is None or isinstance(own, bool) != isinstance(wanted, bool):
        return (own is wanted) == (condition.sign != "!=") if condition.sign in ("=", "==", "!=") else False
    return _COMPARE[condition.sign](own, wanted)


def _value(condition: Condition, name: str, own: Any) -> Any:
    """Return the value of a condition as one that can be compared with ``own``."""
    text = condition.value
    if isinstance(own, int | float) and not isinstance(own, bool):
        return _WORDS[text.lower()] if text.lower() in _WORDS else _number(condition, _UNITS.get(name, {}))
    if own is None or isinstance(own, bool):
        return _WORDS.get(text.lower(), text)
    return text if isinstance(own, str) else _same_list(text, own)


def _same_list(text: str, own: Any) -> Any:
    """Return ``own``, a list, if a text such as ``0.9,0.999`` stands for it; else another list."""
    return own if text.strip("[]").replace(" ", "") == ",".join(map(str, own)) else []


def _number(condition: Condition, units: dict[str, float]) -> float:
    text = condition.value
    unit = next((one for one in sorted(units, key=len, reverse=True) if text.endswith(one)), "")
    try:
        return float(text.removesuffix(unit).replace("_", "")) * units.get(unit, 1.0)
    except ValueError:
        also = f", also with a unit ({', '.join(units)})" if units else ""
        raise ConfigurationError(
            f"--where {condition.name}{condition.sign}{shortened(text)}: the column has numbers; give one{also}"
        ) from None


def ordered(rows: Collection[Row], name: str, *, greatest: bool) -> list[Row]:
    """Return rows by the value of a column, the greatest or the least one first. Rows without it come last."""
    present = [row for row in rows if row.get(name) is not None and row[name] == row[name]]
    numbers = all(isinstance(row[name], int | float) for row in present)
    present.sort(key=lambda row: row[name] if numbers else str(row[name]), reverse=greatest)
    there = set(map(id, present))
    return present + [row for row in rows if id(row) not in there]
