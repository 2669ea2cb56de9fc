"""Helpers of several commands: types of arguments, lines of output, and checks of files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
from cyclopts import Parameter, Token
from cyclopts.validators import Number
from rich.console import Console
from rich.text import Text

from trainbus.config.read import shortened
from trainbus.eventloop.checkpoint import AnyPath, RemotePath, as_path, file_kind
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.plain import as_json
from trainbus.eventloop.terminal import cell


def _as_integer(_: Any, tokens: Sequence[Token]) -> int:
    try:
        return int(tokens[0].value)  # cyclopts itself would round 1.5
    except ValueError:
        raise ValueError(f"expected an integer, got {shortened(tokens[0].value)!r}") from None


Positive = Annotated[int, Parameter(converter=_as_integer, validator=Number(gte=1, lt=2**63))]
Seed = Annotated[int, Parameter(converter=_as_integer, validator=Number(gte=0, lt=2**63))]
FileOrURL = Annotated[AnyPath, Parameter(converter=lambda _, tokens: as_path(tokens[0].value), accepts_keys=False)]


Modules = Annotated[list[str] | None, Parameter(name="--import", metavar="MODULE")]


RUNS = Path("runs")
"""The folder in which the commands make and look for runs."""


def to_terminal() -> Console:
    """Return the console for results. In a file or a pipe, tables are wide and never folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def write_json(value: object) -> None:
    """Write a value to the standard output as JSON."""
    sys.stdout.write(as_json(value, str, orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode() + "\n")


def say(*parts: str | tuple[str, str], console: Console | None = None) -> None:
    """Write parts (texts, or texts with a style) as one unwrapped line; escape control characters in them."""
    cells = [cell(part) if isinstance(part, str) else cell(*part) for part in parts]
    (console or to_terminal()).print(Text.assemble(*cells), soft_wrap=True)


def status_of(path: AnyPath, modified: float | None = None) -> tuple[object, int, float | None]:
    """Return a file's identity (equal for all its names), its size, and its Unix time of change; ``modified`` if remote."""
    if isinstance(path, RemotePath):
        return path, int(path.info()["size"]), modified
    status = path.stat()
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime


def check_file(path: AnyPath) -> None:
    """Raise CheckpointError if the file does not exist or is a directory."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; name a file in it (trainbus checkpoint ls {path} lists them)")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")


def check_checkpoint(path: AnyPath) -> None:
    """Raise CheckpointError if a file does not exist or is not a checkpoint. A damaged checkpoint passes."""
    check_file(path)
    kind = file_kind(path)
    if kind == "plain safetensors":
        raise CheckpointError(f"{path} is not a checkpoint but plain safetensors: weights only, without digests")
    if kind == "torch.save":
        command = f"trainbus checkpoint import {path} OUT.safetensors"
        raise CheckpointError(f"{path} is not a checkpoint but a file of torch.save; convert it by: {command}")
    if kind == "unknown" and path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a checkpoint: checkpoints end in .safetensors")
