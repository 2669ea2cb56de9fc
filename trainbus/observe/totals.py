"""``Totals``: summarize the durations of spans in bounded memory."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainbus.observe.costs import BINS, quantile

_DOUBLINGS: Final = 48


def at(values: NDArray[np.int64], name: int) -> int:
    """Return the value of a name; 0 if it has none."""
    return int(values[name]) if name < len(values) else 0


class Totals:
    """Count, sum, maximum and quantiles of the durations of many names, in bounded memory. Times are nanoseconds."""

    def __init__(self) -> None:
        self.calls = np.zeros(0, np.int64)
        self.sums = np.zeros(0, np.int64)
        self.most = np.zeros(0, np.int64)
        self._bins: dict[int, dict[int, int]] = {}  # counts by name and bin; a name of a subscription that is gone keeps few

    def add(self, names: NDArray[np.int64], durations: NDArray[np.int64]) -> None:
        """Add durations, each with the id of its name."""
        if not len(names):
            return
        self._grow(int(names.max()) + 1)
        size = len(self.calls)
        self.calls += np.bincount(names, minlength=size)
        # float64 is exact up to 2**53 ns, a hundred days in one batch.
        self.sums += np.bincount(names, durations, minlength=size).astype(np.int64)
        np.maximum.at(self.most, names, durations)
        bins = np.minimum(np.log2(np.maximum(durations, 1)) * BINS, BINS * _DOUBLINGS - 1).astype(np.int64)
        found, counts = np.unique(names * (BINS * _DOUBLINGS) + bins, return_counts=True)
        for place, number in zip(found.tolist(), counts.tolist(), strict=True):
            name, index = divmod(place, BINS * _DOUBLINGS)
            own = self._bins.setdefault(name, {})
            own[index] = own.get(index, 0) + number

    def mean(self, name: int) -> float:
        """Return the mean duration of a name, in ns; 0 without calls."""
        return at(self.sums, name) / max(at(self.calls, name), 1)

    def quantile(self, name: int, share: float) -> float:
        """Return the duration in ns that ``share`` of the calls do not exceed, exact to 5 %; 0 without calls."""
        return min(quantile(self._bins.get(name, {}), share), float(at(self.most, name)))

    def _grow(self, size: int) -> None:
        more = size - len(self.calls)
        if more > 0:
            self.calls, self.sums, self.most = (np.pad(one, (0, more)) for one in (self.calls, self.sums, self.most))
