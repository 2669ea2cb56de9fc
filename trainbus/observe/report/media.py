"""Lay out the images, histograms and texts of a run, as much as fits the page."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple, TypeVar

import numpy as np

from trainbus.hooks.writers.media import Reported, ReportedHistogram, ReportedImage, ReportedText
from trainbus.observe.curves import Array
from trainbus.observe.report.facts import shortened
from trainbus.observe.report.reported_run import ReportedRun

_MOST_NAMES: Final = 24  # of each kind, of all runs together
_MOST_BYTES: Final = 240_000  # of all images together; base64 makes them a third larger
_MOST_IMAGES: Final = 4  # of one name
_WIDE: Final = 160  # pixels; smaller images are enlarged

R = TypeVar("R", bound=Reported)


class Picture(NamedTuple):
    """An image as a ``data:`` address, and its size on the page; ``enlarged`` if that is larger than the image."""

    line: ReportedImage
    source: str
    width: int
    height: int
    enlarged: bool


class Bins(NamedTuple):
    """The last histogram of a name and, if there are several, the first one, as paths in a picture of 1000 × 100."""

    last: ReportedHistogram
    path: str
    first: ReportedHistogram | None
    outline: str
    low: float
    high: float


class Shown(NamedTuple):
    """What a page shows of one run: pictures and histograms by name, the last text of each name; and how much it leaves out."""

    pictures: dict[str, list[Picture]]
    histograms: dict[str, Bins]
    texts: dict[str, tuple[ReportedText, str]]
    left_out: int


def shown(run: ReportedRun, runs: int) -> Shown:
    """Return what a page about so many runs shows of one."""
    share = max(1, _MOST_NAMES // runs)
    images, histograms, texts = _named(run, ReportedImage), _named(run, ReportedHistogram), _named(run, ReportedText)
    pictures = _pictures(run, {name: images[name] for name in [*images][:share]}, _MOST_BYTES // runs)
    return Shown(
        pictures,
        {name: _bins(histograms[name]) for name in [*histograms][:share]},
        {name: (texts[name][-1], shortened(texts[name][-1].text)) for name in [*texts][:share]},
        sum(max(0, len(own) - share) for own in (histograms, texts)) + len(images) - len(pictures),
    )


def _named(run: ReportedRun, kind: type[R]) -> dict[str, list[R]]:
    return {name: [line for line in lines if isinstance(line, kind)] for (key, name), lines in run.media.items() if key is kind}


def _pictures(run: ReportedRun, images: dict[str, list[ReportedImage]], most: int) -> dict[str, list[Picture]]:
    """Return images of each name: the last of all names first, then others, evenly over the run, as long as they fit."""
    found: dict[str, list[Picture]] = {}
    for lines in zip_longest(*(_spread(own) for own in images.values())):
        for line in lines:
            if line is None or (content := run.picture(line.file, most)) is None:
                continue
            most -= len(content)
            times = max(1, _WIDE // max(line.width, 1))
            source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            found.setdefault(line.name, []).append(Picture(line, source, line.width * times, line.height * times, times > 1))
    return {name: sorted(own, key=lambda one: one.line.iter) for name, own in found.items()}


def _spread(lines: Sequence[ReportedImage]) -> Iterator[ReportedImage]:
    """Yield the last line, then the first one, then some between them."""
    order = np.linspace(0, len(lines) - 1, min(len(lines), _MOST_IMAGES)).astype(int).tolist()
    yield from (lines[index] for index in [order[-1], *order[:-1]])


def _bins(lines: Sequence[ReportedHistogram]) -> Bins:
    last, first = lines[-1], lines[0] if len(lines) > 1 else None
    both = [last] if first is None else [last, first]
    filled = [one for one in both if sum(one.counts)] or both
    low, high = min(one.low for one in filled), max(one.high for one in filled)
    highest = max(_densities(one).max(initial=0.0) for one in both) or 1.0
    outline = "" if first is None else _path(first, low, high, highest)
    return Bins(last, _path(last, low, high, highest), first, outline, low, high)


def _densities(one: ReportedHistogram) -> Array:
    """Return the shares of the values per unit, because bins of other histograms have other widths."""
    counts = np.array(one.counts, np.float64)
    width = (one.high - one.low) / max(len(counts), 1)
    shares: Array = counts / max(counts.sum(), 1.0)
    return shares / (width if width > 0 else 1.0)


def _path(one: ReportedHistogram, low: float, high: float, highest: float) -> str:
    span = high - low if high > low else 1.0
    edges = np.clip((np.linspace(one.low, one.high, len(one.counts) + 1) - low) / span * 1000, 0, 1000)
    steps = (f"V{100 - 98 * height / highest:.0f}H{edge:.0f}" for height, edge in zip(_densities(one), edges[1:], strict=True))
    return f"M{edges[0]:.0f} 100{''.join(steps)}V100Z"
