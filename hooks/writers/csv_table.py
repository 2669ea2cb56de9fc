"""Scalars as CSV: one row for each moment, one column for each name, for spreadsheets and pandas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eventloop import check_options, register
from hooks.options import Name, PositiveInt
from hooks.writers.base import RunFacts, Where, Writer
from hooks.writers.table import Table


@register
class CSVWriter(Writer):
    """Appends rows to ``<work_dir>/scalars.csv``: ``step``, ``epoch``, ``iter``, and a column for each scalar.

    Names that come later get columns of their own, at the right; for that the file is written anew, so give a name to
    everything early if there are many. A cell is empty where there was no value; NaN and infinities are ``nan``, ``inf`` and
    ``-inf``, which Python's ``float``, pandas and R read. Without a work dir nothing is written. A resumed run goes on at
    the end of the file; rows of iterations that are made again come twice, and the later one holds. A symbolic link of the
    file's name is an error, not followed.

    Args:
        filename: within the work dir.
        interval: iterations between rows; None takes the logger's.

    Raises:
        ConfigurationError: an interval that is not positive, or an empty file name.
    """

    @check_options
    def __init__(self, filename: Name = "scalars.csv", *, interval: PositiveInt | None = None) -> None:
        super().__init__(interval)
        self.filename = filename
        self._directory: Path | None = None
        self._table: Table | None = None

    def open(self, run: RunFacts) -> None:
        """Note the work dir; the file is made when there is something to write."""
        self._directory = run.work_dir

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Append a row."""
        if self._directory is None:
            return
        if self._table is None:
            self._table = Table(self._directory / self.filename)
        # True and False among numbers would make a column of text for most readers.
        numbers = {name: int(value) if isinstance(value, bool) else value for name, value in scalars.items()}
        self._table.append({"step": step, "epoch": where.epoch, "iter": where.iter, **numbers})

    def flush(self) -> None:
        """Hand the rows to the operating system."""
        if self._table is not None:
            self._table.flush()

    def sync(self) -> None:
        """Have the rows on disk."""
        if self._table is not None:
            self._table.flush(durable=True)

    def close(self) -> None:
        """Close the file."""
        table, self._table = self._table, None
        if table is not None:
            table.close()
