"""Write scalars, images, histograms and texts as JSON lines: one object per line, for pandas, jq and plotting scripts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import orjson

from trainbus.eventloop import check_options
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name, PositiveInt
from trainbus.hooks.writers.base import Image, Row, RunFacts, Where
from trainbus.hooks.writers.files import FileWriter, replace
from trainbus.hooks.writers.histogram import BinCounts
from trainbus.hooks.writers.media import MEDIA, PICTURES, SCALARS, AnyReported, ReportedHistogram, ReportedImage, ReportedText
from trainbus.hooks.writers.png import png


@register
class JSONLinesWriter(FileWriter):
    """Append ``{"step": 41, "epoch": 1, "iter": 41, "time": 1764000000.5, "train/loss": 0.25, ...}`` to ``scalars.jsonl``.

    - ``time`` is when the line was written, in seconds since 1970. Lines are written together, up to 0.25 s after an iteration.
    - Images, histograms and texts go to ``media.jsonl``, and the images themselves to the folder ``media``, as PNG files.
      ``trainbus report`` shows them. With another ``filename``, such as ``raw.jsonl``, it is ``raw_media.jsonl``.
    - Test metrics go to ``test_metrics.json``, as one object, and the run's configuration to ``config.json``.
    - NaN and infinities are ``NaN`` and ``Infinity``, never null. Python's ``json``, pandas and most parsers read them.
    - A resumed run appends to the file. Repeated iterations have two lines; the later one counts. A validation that a resume
      repeats with the same results has one.
    - Without a work dir nothing is written. A symbolic link with the file's name is an error.

    Args:
        filename: name of the file in the work dir.
        interval: iterations between lines; None uses the logger's.
    """

    @check_options
    def __init__(self, filename: Name = "scalars.jsonl", *, interval: PositiveInt | None = None) -> None:
        super().__init__(filename, interval)
        own = "" if filename == SCALARS else f"{Path(filename).stem}_"
        self._media = FileWriter(f"{own}{MEDIA}", None)
        self._pictures = f"{own}{PICTURES}"

    def files(self) -> Collection[str]:
        return (self.filename, self._media.filename, self._pictures)

    def open(self, run: RunFacts) -> None:
        super().open(run)
        self._media.open(run)

    def flush(self) -> None:
        super().flush()
        self._media.flush()

    def sync(self) -> None:
        super().sync()
        self._media.sync()

    def close(self) -> None:
        super().close()
        self._media.close()

    def write_reported(self, name: str, value: Image | BinCounts | str, step: int, where: Where) -> None:
        at: dict[str, Any] = {"name": name, "step": step, "epoch": where.epoch, "iter": where.iter, "time": _now()}
        line: AnyReported
        if isinstance(value, str):
            line = ReportedText(**at, text=value)
        elif isinstance(value, BinCounts):
            shared = {field: getattr(value, field) for field in ReportedHistogram.__struct_fields__ if field not in at}
            line = ReportedHistogram(**at, **shared)
        else:
            # Another name may look the same as a file name; a repeated iteration replaces its file.
            file = f"{re.sub(r'[^A-Za-z0-9=.-]', '_', name)[:100]}-{where.iter}-{crc32(at['name'].encode()):08x}.png"
            replace(self.directory / self._pictures / file, png(value))
            line = ReportedImage(**at, file=file, width=value.shape[1], height=value.shape[0])
        self._media.append(msgspec.json.encode(line) + b"\n")

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        line = _encode({"step": step, "epoch": where.epoch, "iter": where.iter, "time": _now(), **scalars})
        if where.stage == "test":
            replace(self.directory / "test_metrics.json", line)
        elif not self.repeats(scalars, step, where):
            self.append(line)

    def line_reader(self) -> Callable[[bytes], Mapping[str, Any]]:
        return json.loads

    def write_rows(self, rows: Sequence[Row]) -> None:
        self._trains = True
        now = _now()
        full = [
            {"step": step, "epoch": where.epoch, "iter": where.iter, "time": now, **scalars} for scalars, step, where in rows
        ]
        try:
            lines = [orjson.dumps(row, None, orjson.OPT_APPEND_NEWLINE) for row in full]
        except TypeError:  # an integer that 64 bits do not hold
            lines = [_encode(row) for row in full]
        # orjson writes NaN and infinities as null. The bytes may also be part of a name, which changes nothing.
        if b":null" in b"".join(lines):
            lines = [_encode(row) for row in full]
        # Not joined: of a text that is longer than its buffer, a file may write half a line before an error.
        for line in lines:
            self.append(line)

    def write_config(self, config: Mapping[str, Any]) -> None:
        if config:
            text = json.dumps(config, indent=2, ensure_ascii=False)
            replace(self.directory / "config.json", f"{text}\n".encode())


def _now() -> float:
    return round(time.time(), 3)


def _encode(record: Mapping[str, float]) -> bytes:
    # orjson is several times faster, but writes NaN as null. The sum is finite unless a value is not (or the sum overflows).
    with suppress(TypeError, OverflowError):  # an integer that 64 bits, or a float, do not hold
        if isfinite(sum(record.values())):
            return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
