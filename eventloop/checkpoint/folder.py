"""Checkpoints that are folders, written by another trainer, with the state of the bus in one file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from eventloop.checkpoint.commit import failing, sync_directory, temporary_name
from eventloop.errors import CheckpointError

STATE_FILE: Final = "trainbus.pt"
"""The file in such a folder that holds the state of the bus."""


def is_folder(path: object) -> bool:
    """Return True for a local folder that holds the state of a bus."""
    return isinstance(path, Path) and (path / STATE_FILE).is_file() and not path.is_symlink()


def sync_folder(folder: Path) -> None:
    """Make the files of a folder durable."""
    with failing(f"cannot write {folder}"):
        for path in (*folder.rglob("*"), folder):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(folder.parent)


def commit_folder(written: Path, folder: Path, *, replace: bool = False) -> None:
    """Make a complete folder durable, then rename it to ``folder``; a folder of that name is replaced.

    Raises:
        CheckpointError: the folder of that name has no state of a bus, and ``replace`` is False; or a step failed.
    """
    sync_folder(written)
    former = _set_aside(folder, replace=replace) if folder.exists() else None
    with failing(f"cannot write {folder}"):
        try:
            written.rename(folder)
        except OSError:
            if former is not None:
                former.rename(folder)
            raise
        sync_directory(folder.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def link_folder(existing: Path, new: Path) -> None:
    """Give a folder a second name: a folder with hard links to its files, or with copies where links are not possible."""
    temporary = Path(temporary_name(str(new.parent)))
    with failing(f"cannot give {existing} the name {new}"):
        shutil.copytree(existing, temporary, copy_function=_link_or_copy)
    commit_folder(temporary, new)


def remove_folder(folder: Path) -> None:
    """Remove a folder that holds the state of a bus; under its name it disappears at once."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def _set_aside(folder: Path, *, replace: bool = False) -> Path:
    if not (replace or is_folder(folder)):
        raise CheckpointError(f"{folder} has no {STATE_FILE}, so it is not a checkpoint of this bus: move it away")
    aside = Path(temporary_name(str(folder.parent)))
    with failing(f"cannot remove {folder}"):
        folder.rename(aside)
        sync_directory(folder.parent)
    return aside


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
