"""Smoothing of logged scalars: means over windows, and windows of the user's own."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from eventloop import ConfigurationError, check_options
from hooks.options import PositiveInt

Method = Literal["mean", "min", "max", "current"]
WindowSize = PositiveInt | Literal["epoch", "global"]

_OPTIONS = {"data_src", "log_name", "method_name", "window_size"}


class CustomWindow(msgspec.Struct, frozen=True):
    """One further value of a scalar: ``method_name`` over its last ``window_size`` values, its epoch or the whole run.

    ``log_name`` is what it is logged as; by default it takes the place of ``data_src``.
    """

    data_src: str
    log_name: str
    method_name: Method = "mean"
    window_size: WindowSize = "global"


class Smoother:
    """Takes the scalars of every iteration and tells what to log.

    Args:
        window_size: iterations of the mean.
        mean_pattern: regular expression; keys it is found in are averaged, all others logged as they are.
        custom_cfg: windows of the user's own, as mappings with ``data_src``, ``method_name`` (``"mean"``, ``"min"``,
            ``"max"``, ``"current"``), ``window_size`` (iterations, ``"epoch"``, or ``"global"``, which it is by default as in
            MMEngine) and ``log_name``.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    @check_options
    def __init__(
        self,
        window_size: PositiveInt = 10,
        mean_pattern: str = r"loss|time|data_time|grad_norm",
        custom_cfg: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._window_size = window_size
        try:
            self._mean_pattern = re.compile(mean_pattern)
        except (re.error, TypeError) as error:
            raise ConfigurationError(f"mean_pattern={mean_pattern!r} is not a regular expression: {error}") from None
        self._customs = [_custom(entry) for entry in custom_cfg]
        _check_names(self._customs)
        self._latest: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._windows: dict[str, deque[float]] = {}
        self._averaged: dict[str, bool] = {}
        self._custom_values = [_aggregate(custom) for custom in self._customs]
        self.count = 0
        """Iterations taken so far."""

    @property
    def customised(self) -> bool:
        """True if there are windows of the user's own."""
        return bool(self._customs)

    def begin_epoch(self) -> None:
        """Forget what windows of an epoch hold."""
        for custom, values in zip(self._customs, self._custom_values, strict=True):
            if custom.window_size == "epoch":
                values.clear()

    def push(self, scalars: Mapping[str, float]) -> None:
        """Take the scalars of one iteration."""
        self.count += 1
        for key, value in scalars.items():
            self._latest[key] = value
            self._seen[key] = self.count
            if self._is_averaged(key):
                window = self._windows.get(key)
                if window is None:
                    window = self._windows[key] = deque(maxlen=self._window_size)
                window.append(value)
        for custom, values in zip(self._customs, self._custom_values, strict=True):
            if custom.data_src in scalars:
                values.add(scalars[custom.data_src])

    def read(self, since: int = 0, *, smooth: bool = True) -> dict[str, float]:
        """Return what to log of the keys that came after the first ``since`` iterations.

        Args:
            since: :attr:`count` at the last log line. A gradient norm, say, does not come with every iteration.
            smooth: False gives the latest values as they are, and the user's own windows.
        """
        keys = [key for key, seen in self._seen.items() if seen > since]
        values = {key: self._mean(key) if smooth and self._is_averaged(key) else self._latest[key] for key in keys}
        for custom, window in zip(self._customs, self._custom_values, strict=True):
            if window.filled:
                values[custom.log_name] = window.value(custom.method_name)
        return values

    def _is_averaged(self, key: str) -> bool:
        averaged = self._averaged.get(key)
        if averaged is None:
            averaged = self._averaged[key] = self._mean_pattern.search(key) is not None
        return averaged

    def _mean(self, key: str) -> float:
        window = self._windows[key]
        return sum(window) / len(window)


class _Recent:
    """The last few values."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    @property
    def filled(self) -> bool:
        return bool(self._values)

    def clear(self) -> None:
        self._values.clear()

    def add(self, value: float) -> None:
        self._values.append(value)

    def value(self, method: Method) -> float:
        if method == "mean":
            return sum(self._values) / len(self._values)
        if method == "current":
            return self._values[-1]
        return min(self._values) if method == "min" else max(self._values)


class _Running:
    """All values since the beginning, without keeping them."""

    def __init__(self) -> None:
        self.clear()

    @property
    def filled(self) -> bool:
        return self._count > 0

    def clear(self) -> None:
        self._count = 0
        self._sum = 0.0
        self._min = float("inf")
        self._max = float("-inf")
        self._current = 0.0

    def add(self, value: float) -> None:
        self._count += 1
        self._sum += value
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        self._current = value

    def value(self, method: Method) -> float:
        if method == "mean":
            return self._sum / self._count
        if method == "current":
            return self._current
        return self._min if method == "min" else self._max


def _aggregate(custom: CustomWindow) -> _Recent | _Running:
    return _Recent(custom.window_size) if isinstance(custom.window_size, int) else _Running()


def _custom(entry: Mapping[str, Any]) -> CustomWindow:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("data_src"), str) or entry.keys() - _OPTIONS:
        raise ConfigurationError(
            f"custom_cfg: {entry!r}: give a mapping with data_src (the scalar's name) and any of log_name, method_name, "
            "window_size"
        )
    filled = {"log_name": entry["data_src"], "window_size": "global", **entry}
    if filled.get("method_name", "mean") not in ("mean", "min", "max", "current"):
        raise ConfigurationError(f"custom_cfg: method_name={filled['method_name']!r}: mean, min, max or current")
    try:
        return msgspec.convert(filled, CustomWindow)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f'custom_cfg: {entry!r}: {error}; window_size is "epoch", "global" or a number of iterations'
        ) from None


def _check_names(customs: Sequence[CustomWindow]) -> None:
    names = [custom.log_name for custom in customs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"custom_cfg: two windows would be logged as {twice[0]!r}; give one another log_name")
