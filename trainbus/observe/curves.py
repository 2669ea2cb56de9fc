"""``read_curves``: read the scalars of a run into arrays, from a file that may have millions of lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainbus.eventloop.bounds import LATEST
from trainbus.eventloop.seams import Seam
from trainbus.hooks.writers.media import PLACES
from trainbus.observe.story import Cut

Array = NDArray[np.float64]

_MOST: Final = 2.0**53  # of epochs and iterations: larger ones are damaged
BATCH: Final = Seam(50_000)  # lines read before they become arrays


_STAGE: Final = re.compile(r"(train(?:ing)?|val(?:id(?:ation)?)?|eval|test)[/_.-](.+)")  # as in assets/curves.js


def stage_and_name(name: str, stage: str = "train") -> tuple[str, str]:
    """Return the stage (train, val or test) and the name of a scalar: scalars of one name share a chart.

    ``val/accuracy``, ``val_accuracy`` and Transformers' ``eval_accuracy`` are ``("val", "accuracy")``. Of several stages in a
    name, such as ``train/val_loss``, the last one counts; a name without one has ``stage``.
    """
    while found := _STAGE.fullmatch(name):
        stage, name = {"tr": "train", "te": "test"}.get(found[1][:2], "val"), found[2]
    return stage, name


class Curve(NamedTuple):
    """The values of one scalar, by rising iteration. ``epochs`` and ``times`` are NaN where the file lacks them."""

    iterations: Array
    epochs: Array
    times: Array
    values: Array

    def thinned(self, most: int) -> Curve:
        """Return at most ``most`` points, which keep the look of the curve: the :func:`extremes` of parts of equal length."""
        if len(self.values) <= most:
            return self
        parts = max(1, (most - 2) // (2 if np.isfinite(self.values).all() else 3))
        first, last = self.iterations[0], self.iterations[-1]
        bins = np.minimum((self.iterations - first) / (last - first) * parts, parts - 1).astype(np.int64)
        chosen = extremes(bins, self.values)
        return Curve(*(column[chosen] for column in self))


def extremes(bins: NDArray[np.int64], values: Array) -> NDArray[np.int64]:
    """Return the places, in their order, of the points that show a curve as all of its points would.

    They are both ends, and in each bin the least value, the greatest and the first that is not finite. ``bins`` has the number
    of each point's bin. ``thin`` in ``assets/curves.js`` has the same rule.
    """
    finite = np.isfinite(values)
    within, bad = np.flatnonzero(finite), np.flatnonzero(~finite)
    kept = [np.array([0, len(values) - 1]), bad[np.unique(bins[bad], return_index=True)[1]]]
    for sign in (1, -1):
        order = within[np.lexsort((sign * values[within], bins[within]))]  # of equal values, the first one
        kept.append(order[np.unique(bins[order], return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def read_curves(lines: Iterable[Mapping[str, Any]], cuts: Iterable[Cut] = ()) -> dict[str, Curve]:
    """Return the curve of each scalar, by its name.

    A line is ``{"step": 10, "epoch": 1, "iter": 10, "time": 1764000000.5, "train/loss": 0.5, ...}``. Where the iterations
    go back, because a run was resumed, the later lines count. A resume among ``cuts`` drops what it abandoned.
    """
    tables: list[tuple[dict[str, int], Array]] = []
    waiting: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    number = 0
    for number, line in enumerate(lines, 1):
        names = tuple(line)
        row = (number, *line.values())
        if names in waiting:
            waiting[names].append(row)
        else:
            waiting[names] = [row]
        if number % BATCH.value == 0:
            tables.extend(_tables(waiting))
            waiting.clear()
    tables.extend(_tables(waiting))
    pieces: dict[str, list[Array]] = {}
    for columns, table in tables:
        for name, index in columns.items():
            if name not in PLACES and name:
                pieces.setdefault(name, []).append(_piece(columns, table, index))
    curves = ((name, _joined(own, tuple(cuts))) for name, own in pieces.items())
    return {name: curve for name, curve in curves if len(curve.values)}


def _tables(waiting: Mapping[tuple[str, ...], list[tuple[Any, ...]]]) -> Iterable[tuple[dict[str, int], Array]]:
    for names, rows in waiting.items():
        columns = {"": 0} | {name: index for index, name in enumerate(names, 1)}
        yield columns, _as_floats(rows)


def _as_floats(rows: list[tuple[Any, ...]]) -> Array:
    """Return rows as an array, with ``_MISSING`` for values that are not numbers."""
    if all(type(value) in (int, float) for value in rows[0]):
        try:
            return np.array(rows, np.float64)
        except (ValueError, TypeError, OverflowError):
            pass  # a later row has a value of another type
    return np.array([[_number(value) for value in row] for row in rows], np.float64)


_MISSING: Final = -1.2345678901234567e308  # marks a value that is not a number; a NaN in the file stays NaN


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        return _MISSING
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _piece(columns: Mapping[str, int], table: Array, index: int) -> Array:
    """Return rows of line number, iteration, epoch, time and value, of the lines that have a value."""
    lines = table[:, 0]
    missing = np.full_like(lines, np.nan)
    epochs, times, steps, iterations = (
        _within(table[:, columns[name]], most) if name in columns else missing
        for name, most in (("epoch", _MOST), ("time", LATEST), ("step", _MOST), ("iter", _MOST))
    )
    places = np.where(np.isfinite(iterations), iterations, np.where(np.isfinite(steps), steps, lines))
    values = table[:, index]
    there = values != _MISSING
    piece: Array = np.column_stack((lines, places, epochs, times, values))[there]
    return piece


def _within(column: Array, most: float) -> Array:
    """Return a column with NaN for what is missing, negative or too large."""
    return np.where((column >= 0) & (column <= most), column, np.nan)


def _joined(pieces: list[Array], cuts: Iterable[Cut]) -> Curve:
    """Join pieces to one curve. Drops points that a resumed run repeats: at or after the iteration of a later point."""
    rows = np.concatenate(pieces)
    for cut in cuts:
        rows = rows[~((rows[:, 3] < cut.time) & (rows[:, 1] > cut.iter))]
    if len(pieces) > 1:
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    later = np.minimum.accumulate(rows[::-1, 1])[::-1]
    rows = rows[np.append(rows[:-1, 1] < later[1:], True)] if len(rows) else rows
    return Curve(*rows[:, 1:].T.copy())
