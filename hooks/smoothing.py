"""Smooth logged scalars: means over windows, and the user's windows."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import add
from typing import Any, Literal

import msgspec

from trainbus.eventloop import ConfigurationError, check_options
from trainbus.hooks.options import PositiveInt

STATES = r"(^|/)(([^/]*[-_])?(lr|learning_rate)([-_][^/]*)?|momentum|weight_decay|loss_scale|eta)(/|$)"
"""Matches the names of states: learning rates and the like, which are set, and logged as they are."""

MEASURED = rf"^(?!.*{STATES})"  # matches all other names, of measurements


class Smoother:
    """Collect the scalars of every iteration, and return the values to log.

    A scalar that each iteration reports, or each update, is averaged. One that leaves out updates, such as the loss of a
    validation or the return of an episode, is an event: each of its values is written, at its own iteration.

    The arguments are options of ``LoggerHook``. ``custom_cfg`` has mappings with ``data_src`` (the scalar's name),
    ``method_name`` (``"mean"``, ``"min"``, ``"max"``, ``"current"``), ``window_size`` (iterations, ``"epoch"`` or ``"global"``,
    the default) and ``log_name`` (by default the window replaces ``data_src``).
    """

    @check_options
    def __init__(
        self, window_size: PositiveInt = 10, mean_pattern: str = MEASURED, custom_cfg: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.window_size = window_size
        try:
            self._mean_pattern = re.compile(mean_pattern)
        except re.error as error:
            raise ConfigurationError(f"mean_pattern={mean_pattern!r} is not a regular expression: {error}") from None
        self._customs = [_Window(entry) for entry in custom_cfg]
        self.customised = bool(self._customs)
        self.reach = window_size
        """Iterations that a line may depend on besides its own."""
        names = [custom.options.log_name for custom in self._customs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"custom_cfg: two windows have the name {twice!r}; give one of them another log_name")
        self.begin_run()

    def begin_run(self) -> None:
        self._first: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._gaps: dict[str, tuple[int, int]] = {}  # the last two iterations with a value behind updates without one
        self._windows: dict[str, deque[tuple[int, float]]] = {}  # the last values, each with the number of its iteration
        self._averaged: dict[str, bool] = {}
        self.count = 0  # number of iterations so far
        self._updates: deque[int] = deque(maxlen=self.reach)  # that each of the last iterations began with
        for custom in self._customs:
            custom.clear()

    def begin_epoch(self) -> None:
        for custom in self._customs:
            if custom.options.window_size == "epoch":
                custom.clear()

    def push(self, scalars: Mapping[str, float], update: int) -> None:
        """Take the scalars of an iteration before which there were so many updates."""
        self.count = count = self.count + 1
        self._updates.append(update)
        seen = self._seen
        for key, value in scalars.items():
            last = seen.get(key)
            if last is None:
                self._begin(key, count)
            elif last != count - 1 and self._misses(last):
                self._gaps[key] = self._gaps.get(key, (0, 0))[1], count
            seen[key] = count
            self._windows[key].append((count, value))
        for custom in self._customs:
            if custom.options.data_src in scalars:
                custom.add(scalars[custom.options.data_src])

    def pass_over(self, updates: Sequence[int]) -> None:
        """Take iterations without scalars, of each the number of updates before it."""
        self.count += len(updates)
        self._updates.extend(updates)

    def line(self, begin: int, *, smooth: bool = True) -> dict[int, dict[str, float]]:
        """Return the values to write by iteration: the line of the present one, and events before it.

        ``begin`` is the first iteration behind the line before. Without ``smooth`` the latest values replace the means.
        """
        rows, values = self._late(begin), {}
        for key, seen in self._seen.items():
            if seen == self.count and self._is_event(key, begin):
                values[key] = self._windows[key][-1][1]
            elif not (self._is_event(key, begin) or self._has_ended(key, seen)):
                values[key] = self._mean(key) if smooth and self._averaged[key] else self._windows[key][-1][1]
        return {**rows, self.count: values | self._custom_values()}

    def events(self, begin: int) -> dict[int, dict[str, float]]:
        """Return the values of events that the present iteration brings or reveals, by iteration; it has no line."""
        rows: dict[int, dict[str, float]] = {}
        for key, (before, gap) in self._gaps.items():
            if gap >= begin and self._seen[key] == self.count:
                # The first gap of a line reveals that the values before it were events, too.
                _add(rows, key, self._values(key, begin if gap == self.count and before < begin else self.count))
        return rows

    def end(self, begin: int, *, line: bool) -> dict[int, dict[str, float]]:
        """Return the values to write at the end of an epoch, by iteration; without a ``line``, only of what is in no other."""
        if line:
            rows = self.line(begin)
            for key in [key for key in rows[self.count] if key in self._gaps and self._gaps[key][1] >= begin]:
                del rows[self.count][key]  # it was an event
            return rows
        rows = self._late(begin, but_now=False)
        for key, first in self._first.items():
            if first >= begin and not self._is_event(key, begin) and not self._has_ended(key, self._seen[key]):
                _add(rows, key, self._values(key, begin))
        return rows

    def _late(self, begin: int, *, but_now: bool = True) -> dict[int, dict[str, float]]:
        """Return the values of events that are only known as such now, by iteration, without those of the present one."""
        rows = {number: row for number, row in self.events(begin).items() if number < self.count} if but_now else {}
        for key, seen in self._seen.items():
            if seen >= begin and not self._is_event(key, begin) and self._has_ended(key, seen):
                _add(rows, key, self._values(key, begin))
        return rows

    def _begin(self, key: str, count: int) -> None:
        self._first[key] = count
        self._windows[key] = deque(maxlen=self.window_size)
        self._averaged[key] = bool(self._mean_pattern.search(key))

    def _misses(self, seen: int) -> bool:
        """Return True if a scalar last ``seen`` in that iteration has missed one since, other than within an accumulation."""
        ago, updates = self.count - seen, self._updates
        # One change: an update between the two iterations, and none before or behind it.
        return bool(ago) and (ago >= len(updates) or len({*islice(updates, len(updates) - 1 - ago, None)}) != 2)

    def _has_ended(self, key: str, seen: int) -> bool:
        """Return True if the values of a scalar, last ``seen`` in that iteration, do not reach to the present one."""
        if seen == self.count:
            return False
        window = self._windows[key]
        accumulates = len(window) > 1 and window[-1][0] - window[-2][0] > 1
        return not accumulates or self._misses(seen)

    def _is_event(self, key: str, begin: int) -> bool:
        return key in self._gaps and self._gaps[key][1] >= begin

    def _values(self, key: str, begin: int) -> Iterator[tuple[int, float]]:
        return (one for one in self._windows[key] if one[0] >= begin)

    def _mean(self, key: str) -> float:
        window = self._windows[key]
        own = [value for number, value in window if number > self.count - self.window_size]
        return sum(own) / len(own) if own else window[-1][1]

    def _custom_values(self) -> dict[str, float]:
        return {custom.options.log_name: custom.value() for custom in self._customs if custom.count}

    def state_dict(self) -> dict[str, Any]:
        keys = {
            key: [seen, self._first[key], self._gaps.get(key, (0, 0)), list(self._windows[key])]
            for key, seen in self._seen.items()
        }
        customs = [custom.state_dict() for custom in self._customs]
        return {"count": self.count, "scalars": keys, "updates": [*self._updates], "customs": customs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the windows of :meth:`state_dict`; custom windows only where these are the same."""
        self.begin_run()
        self.count = state["count"]
        self._updates.extend(state.get("updates", ()))
        earlier = {
            key: (seen, 0, (0, 0), values or [(seen, last)]) for key, (seen, last, values) in state.get("keys", {}).items()
        }
        for key, (seen, first, gaps, values) in state.get("scalars", earlier).items():
            self._begin(key, first)
            self._seen[key] = seen
            if any(gaps):
                self._gaps[key] = gaps[0], gaps[1]
            self._windows[key].extend((number, value) for number, value in values)
        known = {custom["name"]: custom for custom in state["customs"]}
        for custom in self._customs:
            custom.load_state_dict(known.get(custom.state_dict()["name"]))


def _add(rows: dict[int, dict[str, float]], key: str, values: Iterable[tuple[int, float]]) -> None:
    for number, value in values:
        rows.setdefault(number, {})[key] = value


_FOLDS: dict[str, Callable[[float, float], float]] = {"mean": add, "min": min, "max": max, "current": lambda _, new: new}


class _WindowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data_src: str
    log_name: str
    method_name: Literal["mean", "min", "max", "current"] = "mean"
    window_size: PositiveInt | Literal["epoch", "global"] = "global"


class _Window:
    """The last ``window_size`` values; without a number, one value folded from all values."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        try:
            self.options = options = msgspec.convert({"log_name": entry["data_src"], **entry}, _WindowOptions)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            known = 'method_name (mean, min, max or current) and window_size ("epoch", "global" or a number of iterations)'
            advice = f"give a mapping with data_src (the scalar's name) and any of log_name, {known}"
            raise ConfigurationError(f"custom_cfg: {entry!r}: {error}; {advice}") from None
        self._fold = _FOLDS[options.method_name]
        self._size = options.window_size if isinstance(options.window_size, int) else None
        self._values: deque[float] = deque(maxlen=self._size or 1)
        self.count = 0

    def clear(self) -> None:
        self._values.clear()
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        options = self.options
        name = f"{options.log_name} {options.data_src} {options.method_name} {options.window_size}"
        return {"name": name, "count": self.count, "values": list(self._values)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self._values.extend(state["values"])
            self.count = state["count"]

    def add(self, value: float) -> None:
        self.count += 1
        folds = self._size is None and self._values
        self._values.append(self._fold(self._values[0], value) if folds else value)

    def value(self) -> float:
        value = reduce(self._fold, self._values)
        return value / min(self.count, self._size or self.count) if self.options.method_name == "mean" else value
