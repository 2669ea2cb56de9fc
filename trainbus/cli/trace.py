"""``trainbus trace``: merge traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainbus.cli.common import say
from trainbus.eventloop.checkpoint import commit_bytes
from trainbus.eventloop.errors import ConfigurationError


def merge_files(
    *files: Annotated[Path, Parameter(name="FILE")],
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("trace.merged.json"),
    force: bool = False,
) -> None:
    """Merge traces into one file, with their clocks aligned: of several ranks, and of torch's profiler.

    Open the file in https://ui.perfetto.dev. Each process has a separate number in it, and the rank in its name.

    Files of one machine are aligned to a few microseconds. Files of several machines are aligned as well as their clocks
    agree: with NTP to about a millisecond.

    Args:
        files: files of a TraceHook, such as trace.rank0.json, and of a ProfilerHook(json_trace_path=...).
        out: the file to write.
        force: replace it if it exists.
    """
    from trainbus.observe.trace import merge, read_trace

    if not files:
        raise ConfigurationError("no files to merge; name them, such as trace.rank0.json trace.rank1.json")
    for path in (*files, out.parent):
        if not path.exists():
            raise ConfigurationError(f"{path}: no such file or folder")
    if out.exists() and not force:
        raise ConfigurationError(f"{out} exists; add --force to replace it")
    commit_bytes(out, merge({str(path): read_trace(path) for path in files}))
    say(f"{out} has {len(files)} traces; open it at https://ui.perfetto.dev")
