"""The scores of checkpoints: the metrics of the validation of each file's state, in ``scores.json`` beside the files.

They cannot be in the files. A state is saved at the end of an epoch and validated then, and the best file is a further name of
that one. The record knows a file by its digest, which all its names and copies share, and no other file has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from trainbus.eventloop.checkpoint.header import inspect
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, commit_bytes, open_file
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.plain import as_json, encodable

SCORES: Final = "scores.json"
"""File in a directory of checkpoints with their scores, by digest."""

_MOST: Final = 1000
"""Files of a store that the record keeps: it does not look there for those that are gone."""

Score = bool | int | float | str | None
"""The value of a metric; NaN and infinities as text, because JSON has no numbers for them."""

log = get_logger()


class FileScores(msgspec.Struct):
    """What ``scores.json`` has of one file."""

    names: list[str]
    """The names of the file in this directory, for readers of the record."""
    metrics: dict[str, Score]


def read_scores(directory: AnyPath) -> dict[str, FileScores]:
    """Return the scores of the files in a directory, by digest, oldest first; empty, with a warning, if they are damaged.

    Raises:
        OSError: the record cannot be read.
        CheckpointError: the store does not answer.
    """
    try:
        with open_file(directory / SCORES) as (file, _):
            return msgspec.json.decode(file.read(), type=dict[str, FileScores])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning(
            "the scores of these checkpoints cannot be read",
            id="scores-unreadable",
            path=str(directory / SCORES),
            error=str(error),
        )
        return {}


def scores_of(path: AsPath) -> dict[str, Score]:
    """Return the metrics of the validation of a checkpoint's own state; empty if it had none.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: it is not a checkpoint.
    """
    path = as_path(path)
    known = read_scores(path.parent)
    found = known.get(inspect(path).digest) if known else None
    return {} if found is None else found.metrics


def as_metadata(scores: Mapping[str, Score]) -> dict[str, str]:
    """Return the metadata of a plain safetensors file of weights with these scores, whose values are texts."""
    return {name: text if isinstance(text, str) else repr(text) for name, text in scores.items()} | {"format": "pt"}


def _fits(value: Score) -> bool:
    """Return False for an integer that JSON decoders refuse."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def note_scores(directory: AnyPath, digest: str, names: Sequence[str], metrics: Mapping[str, Score]) -> None:
    """Write down the scores of a file, and forget those of local files that are gone.

    Raises:
        CheckpointError: the record cannot be read or written.
    """
    try:
        known = read_scores(directory)
    except OSError as error:
        raise CheckpointError(f"cannot read {directory / SCORES}: {error}") from error
    former = known.pop(digest, None)
    metrics = {name: value if _fits(value) else str(value) for name, value in encodable(metrics).items()}
    own = FileScores(list(dict.fromkeys([*(former.names if former else ()), *encodable(names)])), metrics)
    if former == own:
        return
    known[digest] = own
    if isinstance(directory, Path):
        for one in known.values():
            # A name that is not UTF-8 is spelled out in JSON, so it cannot be looked for.
            one.names = [name for name in one.names if "\\" in name or (directory / name).exists()]
        known = {key: one for key, one in known.items() if one.names}
    text = as_json(msgspec.to_builtins(dict([*known.items()][-_MOST:])))
    commit_bytes(directory / SCORES, msgspec.json.format(text, indent=1))
