"""Changes from the command line: ``loop.max_epochs=3``, ``custom_hooks[0].interval=5``, ``default_hooks.logger=false``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from eventloop.config.places import inside, shortened, wrong
from eventloop.config.values import DEEPEST, FromText, check_bounds, kind_of, parse
from eventloop.errors import ConfigurationError

_STEP = re.compile(r'(?:^|\.)(?:"([^"]+)"|([\w-]+))|\[(-?\d{1,9})\]')


def override(config: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Return ``config`` with changes of the form ``place=value``. A value gets its type from the option it is for.

    Tables on the way are made where there are none, and a name alone (``model = "mine:network"``) becomes a table with that
    ``type`` when an option is given to it.

    Raises:
        ConfigurationError: not of that form, or a place that is none.
    """
    changed = deepcopy(config)
    for change in changes:
        place, equals, text = change.partition("=")
        if not equals:
            raise ConfigurationError(f"{shortened(change)!r}: changes are written as place=value, such as loop.max_epochs=3")
        value = FromText(text.strip())
        try:
            check_bounds(parse(value), place)
        except RecursionError:
            raise wrong(place, f"the value is nested too deeply; a configuration has at most {DEEPEST} levels") from None
        _put(changed, _steps(place.strip()), value)
    return changed


def _steps(place: str) -> list[str | int]:
    steps: list[str | int] = []
    end = 0
    while end < len(place) and (match := _STEP.match(place, end)):
        quoted, name, index = match.groups()
        steps.append(int(index) if index is not None else quoted or name)
        end = match.end()
    if end < len(place) or not steps or isinstance(steps[0], int) or len(steps) > DEEPEST:
        raise ConfigurationError(
            f"{shortened(place)!r} is not a place in a configuration: write loop.max_epochs or custom_hooks[0].interval"
        )
    return steps


def _put(table: Any, steps: list[str | int], value: FromText) -> None:
    here = ""
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        container, here = here, inside(here, step)
        if isinstance(step, int):
            _check_index(table, step, container)
        elif not isinstance(table, dict):
            raise wrong(here, f"{container} is {kind_of(table)}, not a table")
        if following is None:
            table[step] = value
        else:
            table[step] = table = _within(table, step, following, here)


def _check_index(table: Any, index: int, place: str) -> None:
    if not isinstance(table, list):
        raise wrong(inside(place, index), f"{place} is {kind_of(table)}, not a list")
    if not -len(table) <= index < len(table):
        raise wrong(inside(place, index), f"{place} has {len(table)} entries, counted from 0")


def _within(table: Any, step: str | int, following: str | int, place: str) -> Any:
    """Return what is at ``step``, ready for a step into it."""
    found = table[step] if isinstance(step, int) else table.get(step)
    if isinstance(following, int):
        if found is None:
            raise wrong(inside(place, following), f"{place} is not in the configuration")
        return found
    if found is None or found is False:
        return {}
    return {"type": found} if isinstance(found, str) else found
