"""A CSV file that grows, in rows and in columns."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hooks.writers.files import check_in_place, open_to_append, sync


class Table:
    """Appends rows to a CSV file with a header; one that exists is gone on with.

    Columns that a row brings for the first time are put behind the others: the file is then written anew (under another name,
    which replaces it), so that every row has all columns, empty where there was no value. Half a row at the end, of a process
    that died, is cut off: numbers could be cut short and look like others.

    Args:
        path: of the file; folders are made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._open()
        with path.open("r", encoding="utf-8", newline="") as file:
            self._columns = next(csv.reader(file), [])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        if not row.keys() <= set(self._columns):
            self._add_columns([name for name in row if name not in self._columns])
        self._rows.writerow([row.get(name, "") for name in self._columns])

    def flush(self, *, durable: bool = False) -> None:
        """Hand the rows to the operating system, with ``durable`` to the disk."""
        check_in_place(self._file, self._path)
        self._file.flush()
        if durable:
            sync(self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add_columns(self, names: list[str]) -> None:
        columns = [*self._columns, *names]
        self._file.close()
        fresh = self._path.with_name(f"{self._path.name}.tmp")
        fresh.unlink(missing_ok=True)  # of a process that died; or a link to elsewhere
        with self._path.open("r", encoding="utf-8", newline="") as old, fresh.open("x", encoding="utf-8", newline="") as new:
            rows = csv.writer(new, lineterminator="\n")
            rows.writerow(columns)
            lines = csv.reader(old)
            next(lines, None)
            rows.writerows(_padded(lines, len(columns)))
        fresh.replace(self._path)
        self._columns = columns
        self._open()

    def _open(self) -> None:
        # Through to the buffer at once: a text file forgets what it could not hand on, and a later flush would not miss it.
        self._file = TextIOWrapper(open_to_append(self._path), encoding="utf-8", newline="", write_through=True)
        self._rows = csv.writer(self._file, lineterminator="\n")


def add_rows(source: Path, target: Path) -> None:
    """Append the rows of one CSV file to another, each value in the column of its name."""
    table = Table(target)
    try:
        with source.open("r", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                table.append({name: value for name, value in row.items() if name is not None})
    finally:
        table.close()


def _padded(rows: Iterable[list[str]], width: int) -> Iterable[list[str]]:
    return (row + [""] * (width - len(row)) for row in rows)
