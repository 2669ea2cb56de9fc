"""Scalars as JSON lines: one object a line, for pandas, jq and every plotting script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import IO, Any

import orjson

from eventloop import check_options, register
from hooks.options import Name, PositiveInt
from hooks.writers.base import RunFacts, Where, Writer
from hooks.writers.files import check_in_place, open_to_append, replace, sync


@register
class JSONLinesWriter(Writer):
    """Appends ``{"step": 41, "epoch": 1, "iter": 41, "train/loss": 0.25, ...}`` to ``<work_dir>/scalars.jsonl``.

    Without a work dir nothing is written. A resumed run goes on at the end of the file; lines of iterations that are made
    again come twice, and the later one holds. A symbolic link of the file's name is an error, not followed. Test metrics go
    to a file of their own, as one object, and the run's configuration to ``config.json``. NaN and infinities are written as
    ``NaN`` and ``Infinity``, which Python's ``json``, pandas and most parsers read, and never as null.

    Args:
        filename: within the work dir.
        interval: iterations between lines; None takes the logger's.
        test_filename: of the test metrics, within the work dir.

    Raises:
        ConfigurationError: an interval that is not positive, or an empty file name.
    """

    @check_options
    def __init__(
        self,
        filename: Name = "scalars.jsonl",
        *,
        interval: PositiveInt | None = None,
        test_filename: Name = "test_metrics.json",
    ) -> None:
        super().__init__(interval)
        self.filename = filename
        self.test_filename = test_filename
        self._directory: Path | None = None
        self._file: IO[bytes] | None = None

    def open(self, run: RunFacts) -> None:
        """Note the work dir; files are made when there is something to write."""
        self._directory = run.work_dir

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Append a line, or write the file of the test metrics."""
        if self._directory is None:
            return
        line = encode({"step": step, "epoch": where.epoch, "iter": where.iter, **scalars}, finite=_all_finite(scalars))
        if where.stage == "test":
            replace(self._directory / self.test_filename, line)
        else:
            self._lines(self._directory).write(line)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``, if there is a configuration."""
        if self._directory is not None and config:
            text = json.dumps(config, indent=2, ensure_ascii=False)
            replace(self._directory / "config.json", f"{text}\n".encode())

    def flush(self) -> None:
        """Hand the lines to the operating system."""
        if self._file is not None and self._directory is not None:
            check_in_place(self._file, self._directory / self.filename)
            self._file.flush()

    def sync(self) -> None:
        """Have the lines on disk."""
        self.flush()
        if self._file is not None:
            sync(self._file)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _lines(self, directory: Path) -> IO[bytes]:
        if self._file is None:
            self._file = open_to_append(directory / self.filename)
        return self._file


def encode(record: Mapping[str, Any], *, finite: bool) -> bytes:
    """Return ``record`` as one line of JSON. orjson is several times faster, but writes NaN as null."""
    if finite:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _all_finite(scalars: Mapping[str, float]) -> bool:
    # One NaN or infinity makes the sum one; should finite numbers overflow, the slow path writes them just as well.
    return isfinite(sum(scalars.values()))
