"""The lines of ``media.jsonl``: images, histograms and texts that a run has reported.

Unknown kinds and fields in the file, such as of a newer trainbus, are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from trainbus.observe.bounds import Count, Number, Time
from trainbus.observe.story import Cut

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

_KINDS: Final = {kind.__struct_config__.tag for kind in get_args(AnyReported)}


def read_reported(line: Mapping[str, Any]) -> AnyReported | None:
    """Return a line of the file as an object; None if its kind is unknown.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    kind = line.get("kind")
    if isinstance(kind, str) and kind not in _KINDS:
        return None
    read: AnyReported = msgspec.convert(line, AnyReported)
    return read


def present(lines: Iterable[AnyReported], cuts: Sequence[Cut] = ()) -> dict[tuple[type[Reported], str], list[AnyReported]]:
    """Return the lines of each kind and name, by rising iteration: of images all, of the others the first and the last one.

    Leaves out what a resume abandoned, and what a resumed run has reported again.
    """
    found: dict[tuple[type[Reported], str], list[AnyReported]] = {}
    for line in lines:
        if any(line.time < cut.time and line.iter > cut.iter for cut in cuts):
            continue
        kept = found.setdefault((type(line), line.name), [])
        while kept and kept[-1].iter >= line.iter:
            kept.pop()
        if len(kept) > 1 and not isinstance(line, ReportedImage):
            kept.pop()  # a file may have a million of them
        kept.append(line)
    return {key: kept for key, kept in found.items() if kept}
