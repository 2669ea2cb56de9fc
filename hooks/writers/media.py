"""The files of what a run has reported, and the lines of ``media.jsonl``: images, histograms and texts."""

from __future__ import annotations

from typing import Final

import msgspec

from trainbus.eventloop.bounds import Count, Number, Time

SCALARS: Final = "scalars.jsonl"
"""Name of the file with the scalars, one JSON object a line."""
PLACES: Final = ("step", "epoch", "iter", "time")
"""What a line of it has beside the scalars."""
MEDIA: Final = "media.jsonl"
"""Name of the file with the images, histograms and texts of a run, one JSON object a line."""
PICTURES: Final = "media"
"""Name of the folder with the images."""


class Reported(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all: the name with its stage, and where in the run it was reported, as in ``scalars.jsonl``."""

    name: str
    step: Count = 0
    epoch: Count = 0
    iter: Count = 0
    time: Time


class ReportedImage(Reported, tag="image"):
    """An image: its file in the folder ``media``, a PNG, and its size in pixels."""

    file: str
    width: Count
    height: Count


class ReportedHistogram(Reported, tag="histogram"):
    """Values, counted in bins of equal width from ``low`` to ``high``; NaN and infinite values are in no bin."""

    counts: list[Count]
    low: Number
    high: Number
    least: Number
    greatest: Number
    mean: Number
    std: Number
    nan: Count = 0
    infinite: Count = 0


class ReportedText(Reported, tag="text"):
    """A text."""

    text: str


AnyReported = ReportedImage | ReportedHistogram | ReportedText
"""A line of ``media.jsonl``."""
