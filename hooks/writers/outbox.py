"""Copy the files of a finished run to another folder."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from trainbus.eventloop import get_logger, platform
from trainbus.hooks.writers.base import RunFacts
from trainbus.hooks.writers.csv_table import CSVWriter

log = get_logger()


def send(work_dir: Path, out_dir: Path, suffixes: tuple[str, ...], *, moved: Collection[Path] = ()) -> list[Path]:
    """Copy the files below ``work_dir`` whose names end in one of ``suffixes`` to ``<out_dir>/<name of work_dir>``.

    Files in ``moved`` are deleted after copying, and a later run of the same work dir appends to the copy.
    """
    target = out_dir / work_dir.resolve().name
    # Listed before copying, without the files of the target, which may be inside the work dir.
    files = [path for path in sorted(work_dir.rglob("*")) if path.is_file() and path.name.endswith(suffixes)]
    files = [path for path in files if not path.resolve().is_relative_to(target.resolve())]
    return [_send_one(path, target / path.relative_to(work_dir), move=path in moved) for path in files]


def _send_one(path: Path, copy: Path, *, move: bool) -> Path:
    copy.parent.mkdir(parents=True, exist_ok=True)
    if copy.is_symlink():
        copy.unlink()  # do not write to the link's target
        log.info("removed a symbolic link, which a copy replaces", path=str(copy))
    if not move or not copy.exists() or path.suffix not in (".jsonl", ".log", ".csv"):
        shutil.copyfile(path, copy)
    elif path.suffix == ".csv":
        add_rows(path, copy)
    else:
        with path.open("rb") as source, copy.open("ab") as end:
            shutil.copyfileobj(source, end)
    if move:
        platform.patiently(path.unlink)
        log.info("moved a file", path=str(path), to=str(copy))
    return copy


def add_rows(source: Path, target: Path) -> None:
    """Append the rows of one CSV file to another, matching columns by name."""
    table = CSVWriter(target.name)
    table.open(RunFacts("", target.parent))
    with source.open("r", encoding="utf-8", newline="") as file, closing(table):
        for row in csv.DictReader(file):
            table.write_row({name: value for name, value in row.items() if name is not None})
