"""Write scalars as CSV: one row per step, one column per name, for spreadsheets and pandas."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar

from trainbus.eventloop import check_options, platform
from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name, PositiveInt
from trainbus.hooks.writers.base import Where
from trainbus.hooks.writers.files import FileWriter


@register
class CSVWriter(FileWriter):
    """Append rows to ``<work_dir>/scalars.csv``: ``step``, ``epoch``, ``iter``, and a column for each scalar.

    - A later name adds a column at the right, which rewrites the file. Report all names early if the file is large.
    - A cell without a value is empty. NaN and infinities are ``nan``, ``inf`` and ``-inf``, which Python, pandas and R read.
    - A resumed run appends to the file. Repeated iterations have two rows; the later one counts. A validation that a resume
      repeats with the same results has one.
    - Without a work dir nothing is written. A symbolic link with the file's name is an error.

    Args:
        filename: name of the file in the work dir.
        interval: iterations between rows; None uses the logger's.
    """

    of_run: ClassVar = {**FileWriter.of_run, "_rows": None, "_columns": None}

    @check_options
    def __init__(self, filename: Name = "scalars.csv", *, interval: PositiveInt | None = None) -> None:
        super().__init__(filename, interval)

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        # Most readers take a column with True or False for text.
        numbers = {name: int(value) if isinstance(value, bool) else value for name, value in scalars.items()}
        if not self.repeats(scalars, step, where):
            self.write_row({"step": step, "epoch": where.epoch, "iter": where.iter, **numbers})

    def line_reader(self) -> Callable[[bytes], Mapping[str, Any]]:
        with self.path.open("r", encoding="utf-8", newline="") as written:
            columns = next(csv.reader(written), [])
        return lambda line: dict(zip(columns, next(csv.reader([line.decode()])), strict=True))

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Append a row. New columns rewrite the file under another name, which then replaces it: every row has all columns."""
        self._file = self._file or self.open_file()
        fresh = [name for name in row if name not in self._columns]
        if fresh:
            self._add_columns(fresh)
        self._rows.writerow([row.get(name, "") for name in self._columns])

    def _add_columns(self, names: list[str]) -> None:
        self.close()
        copy = self.path.with_name(f"{TEMPORARY_PREFIX}{self.path.name}.tmp")
        copy.unlink(missing_ok=True)  # left by a killed process, or a symbolic link
        with self.path.open("r", encoding="utf-8", newline="") as old, copy.open("x", encoding="utf-8", newline="") as new:
            rows, lines = csv.writer(new, lineterminator="\n"), csv.reader(old)
            columns = [*next(lines, []), *names]
            rows.writerow(columns)
            rows.writerows(line + [""] * (len(columns) - len(line)) for line in lines)
        platform.patiently(copy.replace, self.path)
        self._file = self.open_file()

    def open_to_append(self) -> BinaryIO:
        """Open the file at its end, and read its header."""
        file = super().open_to_append()
        self._rows = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n")
        try:
            with self.path.open("r", encoding="utf-8", newline="") as written:
                self._columns = next(csv.reader(written), [])
        except BaseException:  # also where the header is not text
            file.close()
            raise
        return file
