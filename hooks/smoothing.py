"""Smooth logged scalars: means over windows, and the user's windows."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import msgspec

from eventloop import ConfigurationError, check_options
from hooks.options import PositiveInt

STATES = r"(^|/)(([^/]*[-_])?(lr|learning_rate)([-_][^/]*)?|momentum|weight_decay|loss_scale|eta)(/|$)"
"""Matches the names of states: learning rates and the like, which are set, and logged as they are."""

MEASURED = rf"^(?!.*{STATES})"  # matches all other names, of measurements


class Smoother:
    """Collect the scalars of every iteration, and return the values to log.

    The arguments are options of ``LoggerHook``. All means are over the same iterations, also of a scalar that only some of them
    report. ``custom_cfg`` has mappings with ``data_src`` (the scalar's name),
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
        names = [custom.options.log_name for custom in self._customs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"custom_cfg: two windows have the name {twice!r}; give one of them another log_name")
        self.begin_run()

    def begin_run(self) -> None:
        self._latest: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        # The last values, each with the number of its iteration; None for a scalar that is not averaged.
        self._windows: dict[str, deque[tuple[int, float]] | None] = {}
        self.count = 0  # number of iterations so far
        for custom in self._customs:
            custom.clear()

    def begin_epoch(self) -> None:
        for custom in self._customs:
            if custom.options.window_size == "epoch":
                custom.clear()

    def push(self, scalars: Mapping[str, float]) -> None:
        self.count += 1
        for key, value in scalars.items():
            self._latest[key] = value
            self._seen[key] = self.count
            if key not in self._windows:
                self._windows[key] = self._window(key)
            if (window := self._windows[key]) is not None:
                window.append((self.count, value))
        for custom in self._customs:
            if custom.options.data_src in scalars:
                custom.add(scalars[custom.options.data_src])

    def read(self, since: int = 0, *, smooth: bool = True) -> dict[str, float]:
        """Return the values to log of the keys that were reported after the first ``since`` iterations.

        Some keys (a gradient norm) are not reported in every iteration. Without ``smooth`` the latest values replace the means.
        """
        values = {}
        for key, seen in self._seen.items():
            if seen > since:
                window = (self._windows[key] if smooth else None) or ()
                own = [value for number, value in window if number > self.count - self.window_size] or [self._latest[key]]
                values[key] = sum(own) / len(own) if window else own[0]
        return values | {custom.options.log_name: custom.value() for custom in self._customs if custom.count}

    def state_dict(self) -> dict[str, Any]:
        keys = {key: [self._seen[key], value, list(self._windows[key] or ())] for key, value in self._latest.items()}
        return {"count": self.count, "keys": keys, "customs": [custom.state_dict() for custom in self._customs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the windows of :meth:`state_dict`; custom windows only where these are the same."""
        self.begin_run()
        self.count = state["count"]
        for key, (seen, latest, values) in state["keys"].items():
            self._seen[key], self._latest[key], self._windows[key] = seen, latest, self._window(key)
            if (window := self._windows[key]) is not None:
                window.extend((number, value) for number, value in values)
        known = {custom["name"]: custom for custom in state["customs"]}
        for custom in self._customs:
            custom.load_state_dict(known.get(custom.state_dict()["name"]))

    def _window(self, key: str) -> deque[tuple[int, float]] | None:
        return deque(maxlen=self.window_size) if self._mean_pattern.search(key) else None


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
