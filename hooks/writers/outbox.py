"""Copy the files of a finished run to another folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from hooks.writers.csv_table import add_rows


def send(work_dir: Path, out_dir: Path, suffixes: tuple[str, ...], *, keep_local: bool) -> list[Path]:
    """Copy the files below ``work_dir`` whose names end in one of ``suffixes`` to ``<out_dir>/<name of work_dir>``.

    Args:
        work_dir: work dir of the run.
        out_dir: parent of the target folder.
        suffixes: suffixes of file names.
        keep_local: False deletes each file after copying. A later run of the same work dir then appends to the copy.

    Returns:
        The copies.
    """
    target = out_dir / work_dir.resolve().name
    # Listed before copying, without the files of the target, which may be inside the work dir.
    files = [path for path in sorted(work_dir.rglob("*")) if path.is_file() and path.name.endswith(suffixes)]
    files = [path for path in files if not path.resolve().is_relative_to(target.resolve())]
    return [_send_one(path, target / path.relative_to(work_dir), keep_local=keep_local) for path in files]


def _send_one(path: Path, copy: Path, *, keep_local: bool) -> Path:
    copy.parent.mkdir(parents=True, exist_ok=True)
    if copy.is_symlink():
        copy.unlink()  # do not write to the link's target
    if keep_local or not copy.exists() or path.suffix not in (".jsonl", ".log", ".csv"):
        shutil.copyfile(path, copy)
    elif path.suffix == ".csv":
        add_rows(path, copy)  # without a second header
    else:
        with path.open("rb") as source, copy.open("ab") as end:
            shutil.copyfileobj(source, end)
    if not keep_local:
        path.unlink()
    return copy
