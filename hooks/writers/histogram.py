"""``BinCounts``: what writers get of a reported histogram; the logger's thread counts the values."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import torch

from trainbus.eventloop.seams import Seam

PART: Final = Seam(1 << 22)  # values that are counted at a time, in double precision
_MOST: Final = 1e300  # larger values count as infinite: the width of the bins would overflow


class BinCounts(msgspec.Struct, frozen=True):
    """The finite values of a tensor, counted in bins of equal width from the least to the greatest.

    If no value is finite, all counts are 0. If all are equal, the bins are around that value.
    """

    counts: list[int]
    low: float
    high: float
    least: float
    greatest: float
    sum: float
    sum_of_squares: float
    nan: int = 0
    """The number of values that are NaN."""
    infinite: int = 0
    """The number of values that are infinite, or beyond 1e300."""

    @property
    def total(self) -> int:
        """The number of finite values."""
        return sum(self.counts)

    @property
    def edges(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The edges of the bins: one more than there are counts."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)

    @property
    def mean(self) -> float:
        """The mean of the finite values; 0 if there are none."""
        return self.sum / max(self.total, 1)

    @property
    def std(self) -> float:
        """The standard deviation of the finite values."""
        return math.sqrt(max(0.0, self.sum_of_squares / max(self.total, 1) - self.mean**2))


def as_histogram(values: torch.Tensor | np.ndarray[Any, Any], bins: int) -> BinCounts:
    """Count the values of a tensor or array of real numbers, on the CPU."""
    # By torch, which lets other threads run while it counts.
    flat = torch.from_numpy(_native(values)).flatten() if isinstance(values, np.ndarray) else values.flatten()
    parts = torch.split(flat, PART.value)
    least, greatest, nan, infinite = math.inf, -math.inf, 0, 0
    for part in map(torch.Tensor.double, parts):
        finite = part.abs() <= _MOST
        missing = int(part.isnan().sum())
        nan += missing
        infinite += int((~finite).sum()) - missing
        if (kept := _only(part, finite)).numel():
            least, greatest = min(least, kept.min().item()), max(greatest, kept.max().item())
    if least > greatest:
        return BinCounts([0] * bins, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, nan, infinite)
    margin = 0.0 if least < greatest else max(0.5, abs(least) * 1e-6)
    low, high = least - margin, greatest + margin
    counts, total, squares = torch.zeros(bins, dtype=torch.float64), 0.0, 0.0
    for part in map(torch.Tensor.double, parts):
        kept = _only(part, part.abs() <= _MOST)
        counts += torch.histc(kept, bins, low, high)
        total += kept.sum().item()
        squares += kept.square().sum().item()
    return BinCounts([int(count) for count in counts.tolist()], low, high, least, greatest, total, squares, nan, infinite)


def _only(part: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return part if chosen.all() else part[chosen]  # mostly all: indexing is several times slower than counting


def _native(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of a type, byte order and layout that torch takes."""
    known = values.dtype.kind == "b" or (values.dtype.kind in "iuf" and values.dtype.itemsize in (1, 2, 4, 8))
    plain = values if known and values.dtype.isnative else values.astype(np.float64)
    return np.ascontiguousarray(plain)
