"""Write scalars as CSV: one row per step, one column per name, for spreadsheets and pandas."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eventloop import check_options, register
from hooks.options import Name, PositiveInt
from hooks.writers.base import Where
from hooks.writers.files import FileWriter, GrowingFile


@register
class CSVWriter(FileWriter):
    """Append rows to ``<work_dir>/scalars.csv``: ``step``, ``epoch``, ``iter``, and a column for each scalar.

    - A later name adds a column at the right, which rewrites the file. Report all names early if the file is large.
    - A cell without a value is empty. NaN and infinities are ``nan``, ``inf`` and ``-inf``, which Python, pandas and R read.
    - A resumed run appends to the file. Repeated iterations have two rows; the later one counts.
    - Without a work dir nothing is written. A symbolic link with the file's name is an error.

    Args:
        filename: name of the file in the work dir.
        interval: iterations between rows; None uses the logger's.

    Raises:
        ConfigurationError: the interval is not positive, or the file name is empty.
    """

    @check_options
    def __init__(self, filename: Name = "scalars.csv", *, interval: PositiveInt | None = None) -> None:
        super().__init__(filename, interval)

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        if self.directory is not None:
            # Most readers take a column with True or False for text.
            numbers = {name: int(value) if isinstance(value, bool) else value for name, value in scalars.items()}
            self.file(Table, self.directory).append({"step": step, "epoch": where.epoch, "iter": where.iter, **numbers})


class Table(GrowingFile):
    """A CSV file that grows in rows and in columns; it continues an existing file.

    A row with new columns rewrites the file under another name and then replaces it, so that every row has all columns.
    """

    def append(self, row: Mapping[str, Any]) -> None:
        fresh = [name for name in row if name not in self._columns]
        if fresh:
            self._add_columns(fresh)
        self._rows.writerow([row.get(name, "") for name in self._columns])

    def _add_columns(self, names: list[str]) -> None:
        self.close()
        copy = self._path.with_name(f"{self._path.name}.tmp")
        copy.unlink(missing_ok=True)  # left by a killed process, or a symbolic link
        with self._path.open("r", encoding="utf-8", newline="") as old, copy.open("x", encoding="utf-8", newline="") as new:
            rows, lines = csv.writer(new, lineterminator="\n"), csv.reader(old)
            columns = [*next(lines, []), *names]
            rows.writerow(columns)
            rows.writerows(line + [""] * (len(columns) - len(line)) for line in lines)
        copy.replace(self._path)
        self.open()

    def open(self) -> None:
        """Open the file at its end, and read its header."""
        super().open()
        self._rows = csv.writer(codecs.getwriter("utf-8")(self._file), lineterminator="\n")
        with self._path.open("r", encoding="utf-8", newline="") as file:
            self._columns = next(csv.reader(file), [])


def add_rows(source: Path, target: Path) -> None:
    """Append the rows of one CSV file to another, matching columns by name."""
    table = Table(target)
    try:
        with source.open("r", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                table.append({name: value for name, value in row.items() if name is not None})
    finally:
        table.close()
