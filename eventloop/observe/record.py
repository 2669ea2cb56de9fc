"""The lines of ``record.jsonl`` as objects. A line of another kind or with other fields, of a newer trainbus, is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from eventloop.observe.costs import Costs


class Line(msgspec.Struct, kw_only=True, tag_field="kind"):
    """What happened: when, in seconds since 1970, and after how many epochs and iterations."""

    time: float
    epoch: int = 0
    iter: int = 0


class Validation(Line, tag="validation"):
    """The results of a validation, and how long it took in seconds."""

    metrics: dict[str, float] = {}
    seconds: float = 0.0


class Test(Line, tag="test"):
    """The results of a test, and how long it took in seconds."""

    metrics: dict[str, float] = {}
    seconds: float = 0.0


class Checkpoint(Line, tag="checkpoint"):
    """A checkpoint that was committed: how long it held training up, and how long writing took, in seconds."""

    names: list[str] = []
    bytes: int = 0
    stall: float = 0.0
    seconds: float = 0.0


class FailedCheckpoint(Line, tag="checkpoint_failed"):
    """A checkpoint that could not be written."""

    names: list[str] = []
    reason: str = ""


class SkippedCheckpoint(Line, tag="checkpoint_skipped"):
    """A checkpoint that was not begun."""

    names: list[str] = []
    reason: str = ""


class Resume(Line, tag="resume"):
    """A checkpoint was loaded."""

    path: str = ""


class Measured(Line, tag="costs"):
    """The costs since the session began."""

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
