"""The entry of a bus in another trainer's checkpoint: what a resume requires of it."""

from __future__ import annotations

from typing import Any

import msgspec

from eventloop.errors import CheckpointError
from eventloop.training.saves.capture import FORMAT
from eventloop.training.state import Count, Counters


class _Entry(msgspec.Struct):
    """The types that a resume requires: the trainer's file may hold any others."""

    format: int
    progress: Counters
    bus: _BusEntry
    info: dict[str, Any] = {}


class _BusEntry(msgspec.Struct):
    hooks: dict[str, Any]
    publishes: dict[str, Count]


def check_entry(entry: object) -> None:
    """Raise CheckpointError if a value is not the entry of a bus, or its format is too new."""
    try:
        known = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint does not hold the state of a bus: {error}") from error
    if known.format > FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {known.format}, but this trainbus reads up to {FORMAT}; upgrade trainbus"
        )
