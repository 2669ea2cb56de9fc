"""Read the lines of ``record.jsonl`` as objects. Skips lines of unknown kinds or fields, such as of a newer trainbus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from eventloop.observe.costs import Costs


class Line(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all lines: the time in seconds since 1970, and the epochs and iterations completed by then."""

    time: float
    epoch: int = 0
    iter: int = 0


class Validation(Line, tag="validation"):
    """The metrics of a validation, and its duration in seconds."""

    metrics: dict[str, float] = {}
    seconds: float = 0.0


class Test(Line, tag="test"):
    """The metrics of a test, and its duration in seconds."""

    metrics: dict[str, float] = {}
    seconds: float = 0.0


class Checkpoint(Line, tag="checkpoint"):
    """A committed checkpoint: the seconds that it held up training, and the seconds of writing.

    ``bytes`` is 0 if the names are further ones of a file that was written before.
    """

    names: list[str] = []
    bytes: int = 0
    stall: float = 0.0
    seconds: float = 0.0


class FailedCheckpoint(Line, tag="checkpoint_failed"):
    """A checkpoint that failed to be written."""

    names: list[str] = []
    reason: str = ""


class SkippedCheckpoint(Line, tag="checkpoint_skipped"):
    """A checkpoint that was skipped."""

    names: list[str] = []
    reason: str = ""


class Resume(Line, tag="resume"):
    """A loaded checkpoint."""

    path: str = ""


class Measured(Line, tag="costs"):
    """The costs since the beginning of the session."""

    costs: Costs


AnyLine = Validation | Test | Checkpoint | FailedCheckpoint | SkippedCheckpoint | Resume | Measured
L = TypeVar("L", bound=Line)


def read_lines(lines: Iterable[Mapping[str, Any]]) -> Iterator[AnyLine]:
    """Yield lines as objects."""
    for line in lines:
        whole = {**line, "costs": line} if line.get("kind") == "costs" else line
        try:
            yield msgspec.convert(whole, AnyLine, strict=False, str_keys=True)
        except msgspec.ValidationError:
            continue
