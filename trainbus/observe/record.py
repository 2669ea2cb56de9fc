"""What happens in a run, as objects: ``entries`` makes them from events, :func:`read_line` from ``record.jsonl``.

Unknown kinds and fields in the file, such as of a newer trainbus, are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar, get_args

import msgspec

from trainbus.eventloop.bounds import Count, Number, Time
from trainbus.observe.costs import Costs
from trainbus.observe.ranks import RankCosts


class Line(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all: the time in seconds since 1970, and the epochs and iterations completed by then."""

    time: Time
    epoch: Count = 0
    iter: Count = 0


class Evaluation(Line):
    """The metrics of a validation or test, and its duration in seconds."""

    stage: ClassVar[str]
    metrics: dict[str, float] = {}
    """From an event, also tensors and arrays of one element."""
    seconds: Number = 0.0


class Validation(Evaluation, tag="validation"):
    """The end of a validation."""

    stage = "val"


class Test(Evaluation, tag="test"):
    """The end of a test."""

    stage = "test"


class Checkpoint(Line, tag="checkpoint"):
    """A committed checkpoint: the seconds that it held up training, and the seconds of writing.

    ``bytes`` is 0 if the names are further ones of a file that was written before.
    """

    names: list[str] = []
    bytes: Count = 0
    stall: Number = 0.0
    seconds: Number = 0.0


class NotWritten(Line):
    """A checkpoint that is not there, and why."""

    names: list[str] = []
    reason: str = ""


class FailedCheckpoint(NotWritten, tag="checkpoint_failed"):
    """A checkpoint that failed to be written."""


class SkippedCheckpoint(NotWritten, tag="checkpoint_skipped"):
    """A checkpoint that was skipped."""


class Resume(Line, tag="resume"):
    """A loaded checkpoint."""

    path: str = ""


class End(Line, tag="end"):
    """The end of a session."""

    state: str = ""
    reason: str = ""
    """The error, or the reason given to ``run.stop()``."""


class Measured(Line, tag="costs"):
    """The costs since the beginning of the session."""

    costs: Costs


class Compared(Line, tag="ranks"):
    """The times of all ranks. Not read back: the costs have the last of them."""

    ranks: RankCosts


class Begin(Line, tag="begin"):
    """A run begins; not a line of the file."""

    name: str
    seed: int | None = None
    config: dict[str, Any] = {}
    world_size: int = 1
    work_dir: str | None = None
    advice: str = ""
    """Without a work dir: how to give one."""
    run: Callable[[], Any] = lambda: None
    """Returns the run, or None if it is gone."""


class Stage(Line, tag="stage"):
    """A stage begins (train, val or test); not a line of the file."""

    name: str
    settings: dict[str, Any] = {}
    """What is known then of the settings of the run, for ``run.json``."""


class Pause(Line, tag="pause"):
    """A pause begins or ends; not a line of the file."""

    begins: bool


AnyLine = Validation | Test | Checkpoint | FailedCheckpoint | SkippedCheckpoint | Resume | End | Measured
Entry = AnyLine | Compared | Begin | Stage | Pause
"""What happens in a run: a line of the file, or what only a story of a live run needs."""
L = TypeVar("L", bound=Line)

_KINDS: Final = {kind.__struct_config__.tag for kind in get_args(AnyLine)}


def fields_of(line: Line) -> dict[str, Any]:
    """Return a line as the object in the file."""
    if isinstance(line, Evaluation):
        line = msgspec.structs.replace(line, metrics={str(name): _float(value) for name, value in line.metrics.items()})
    fields: dict[str, Any] = msgspec.to_builtins(line, str_keys=True)
    measured = {Measured: "costs", Compared: "ranks"}.get(type(line))
    return fields if measured is None else fields | fields.pop(measured)


def read_line(line: Mapping[str, Any]) -> AnyLine | None:
    """Return a line of the file as an object; None if its kind is unknown.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    kind = line.get("kind")
    if isinstance(kind, str) and kind not in _KINDS:
        return None
    whole = {**line, "costs": line} if kind == "costs" else line
    read: AnyLine = msgspec.convert(whole, AnyLine, strict=False, str_keys=True)
    return read


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer that a float does not hold
        return math.inf if value > 0 else -math.inf
