"""The lines of ``record.jsonl`` as objects. Unknown kinds and fields, such as of a newer trainbus, are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec

from eventloop.observe.bounds import Count, Number, Time
from eventloop.observe.costs import Costs


class Line(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all lines: the time in seconds since 1970, and the epochs and iterations completed by then."""

    time: Time
    epoch: Count = 0
    iter: Count = 0


class Validation(Line, tag="validation"):
    """The metrics of a validation, and its duration in seconds."""

    metrics: dict[str, float] = {}
    seconds: Number = 0.0


class Test(Line, tag="test"):
    """The metrics of a test, and its duration in seconds."""

    metrics: dict[str, float] = {}
    seconds: Number = 0.0


class Checkpoint(Line, tag="checkpoint"):
    """A committed checkpoint: the seconds that it held up training, and the seconds of writing.

    ``bytes`` is 0 if the names are further ones of a file that was written before.
    """

    names: list[str] = []
    bytes: Count = 0
    stall: Number = 0.0
    seconds: Number = 0.0


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


class End(Line, tag="end"):
    """The end of a session."""

    state: str = ""
    reason: str = ""


class Measured(Line, tag="costs"):
    """The costs since the beginning of the session."""

    costs: Costs


AnyLine = Validation | Test | Checkpoint | FailedCheckpoint | SkippedCheckpoint | Resume | End | Measured
L = TypeVar("L", bound=Line)


_KINDS: Final = {kind.__struct_config__.tag for kind in get_args(AnyLine)}


def read_line(line: Mapping[str, Any]) -> AnyLine | None:
    """Return a line as an object; None if its kind is unknown.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    kind = line.get("kind")
    if isinstance(kind, str) and kind not in _KINDS:
        return None
    whole = {**line, "costs": line} if kind == "costs" else line
    read: AnyLine = msgspec.convert(whole, AnyLine, strict=False, str_keys=True)
    return read
