"""Taking the files of a finished run to another place."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from eventloop import ConfigurationError
from hooks.writers.table import add_rows

_APPENDED = (".jsonl", ".log")


def check_out(out_dir: object, *, keep_local: bool) -> None:
    """Raise ConfigurationError unless files can be copied (or left) as these options say."""
    if out_dir is None and not keep_local:
        raise ConfigurationError("keep_local=False deletes files once they are copied to out_dir=; give one, or keep them")


def checked_suffixes(out_suffix: str | Sequence[str]) -> tuple[str, ...]:
    """Return the ends of file names.

    Raises:
        ConfigurationError: they are none.
    """
    suffixes = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)
    if not all(isinstance(suffix, str) and suffix for suffix in suffixes):
        raise ConfigurationError(f'out_suffix={out_suffix!r}: give ends of file names, such as (".json", ".log")')
    return suffixes


def send(work_dir: Path, out_dir: Path, suffixes: tuple[str, ...], *, keep_local: bool) -> list[Path]:
    """Copy the files below ``work_dir`` whose names end in one of ``suffixes`` to ``<out_dir>/<name of work_dir>``.

    Args:
        work_dir: of the run.
        out_dir: where the folder is made.
        suffixes: of file names.
        keep_local: False deletes each file once it is copied. What a later run of the same work dir adds to a log is then
            added to the copy.

    Returns:
        The copies.
    """
    target = out_dir / work_dir.resolve().name
    # Listed before anything is copied: the target may lie inside the work dir, and its files are copies already.
    files = [path for path in sorted(work_dir.rglob("*")) if path.is_file() and path.name.endswith(suffixes)]
    return [
        _send_one(path, target / path.relative_to(work_dir), keep_local=keep_local)
        for path in files
        if not path.resolve().is_relative_to(target.resolve())
    ]


def _send_one(path: Path, copy: Path, *, keep_local: bool) -> Path:
    copy.parent.mkdir(parents=True, exist_ok=True)
    if copy.is_symlink():
        copy.unlink()  # a copy is a file of its own, and goes nowhere else
    if not keep_local and path.suffix in _APPENDED and copy.exists():
        with path.open("rb") as source, copy.open("ab") as end:
            shutil.copyfileobj(source, end)
    elif not keep_local and path.suffix == ".csv" and copy.exists():
        add_rows(path, copy)  # a header in the middle of a table would be a row
    else:
        shutil.copyfile(path, copy)
    if not keep_local:
        path.unlink()
    return copy
