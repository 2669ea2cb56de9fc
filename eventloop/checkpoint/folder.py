"""Checkpoints that are folders, written by another trainer, with the state of the bus in one file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import Final

from trainbus.eventloop import platform
from trainbus.eventloop.checkpoint.commit import failing, temporary_name
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger

STATE_FILE: Final = "trainbus.pt"
"""The file in such a folder that holds the state of the bus."""
FORMER_PREFIX: Final = "former-"
"""The names of replaced folders with other files begin with it: no host takes such a folder for one of its checkpoints."""

log = get_logger()


def is_folder(path: object) -> bool:
    """Return True for a local folder that holds the state of a bus."""
    return isinstance(path, Path) and (path / STATE_FILE).is_file() and not path.is_symlink()


def sync_folder(folder: Path) -> None:
    """Make the files of a folder durable."""
    with failing(f"cannot write {folder}"):
        for path in (*folder.rglob("*"), folder):
            platform.sync_path(path)
        platform.sync_directory(folder.parent)


def commit_folder(written: Path, folder: Path, *, replace: bool = False, known: Collection[str] = ()) -> None:
    """Make a complete folder durable, then rename it to ``folder``; a folder of that name is replaced.

    With ``replace``, a former folder with files of an unknown origin is kept as ``former-<name>``: files that are neither in
    ``written`` nor in ``known``.

    Raises:
        CheckpointError: the folder of that name has no state of a bus, and ``replace`` is False; or a step failed.
    """
    sync_folder(written)
    unknown = sorted(files_in(folder) - files_in(written) - set(known)) if replace else []
    former = _set_aside(folder, replace=replace) if folder.exists() else None
    with failing(f"cannot write {folder}"):
        try:
            platform.patiently(written.rename, folder)
        except OSError:
            if former is not None:
                platform.patiently(former.rename, folder)
            raise
        platform.sync_directory(folder.parent)
    if former is not None and unknown:
        kept = free_name(folder.with_name(f"{FORMER_PREFIX}{folder.name}"))
        with failing(f"cannot keep the former {folder}"):
            platform.patiently(former.rename, kept)
        log.warning(
            "the former folder has other files than the checkpoint, so it is kept",
            id="former-folder-kept",
            path=str(kept),
            files=unknown[:8],
        )
    elif former is not None:
        discard_folder(former)


def link_folder(existing: Path, new: Path) -> None:
    """Give a folder a second name: a folder with hard links to its files, or with copies where links are not possible."""
    temporary = Path(temporary_name(str(new.parent)))
    with failing(f"cannot give {existing} the name {new}"):
        shutil.copytree(existing, temporary, copy_function=_link_or_copy)
    commit_folder(temporary, new)


def remove_folder(folder: Path) -> None:
    """Remove a folder that holds the state of a bus; under its name it disappears at once."""
    discard_folder(_set_aside(folder))


def remove_leftover(folder: Path) -> None:
    """Remove a folder with a temporary name that a killed process left, if it is there, and log that.

    Raises:
        CheckpointError: it cannot be removed.
    """
    if folder.is_dir():
        with failing(f"cannot remove {folder}"):
            platform.patiently(shutil.rmtree, folder)
        log.info("removed a folder that a killed process left behind", path=str(folder))


def discard_folder(folder: Path) -> None:
    """Remove a folder, or a link to one, with a temporary name; log an error, because no checkpoint depends on it."""
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            platform.patiently(shutil.rmtree, folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove a temporary folder", id="temporary-folder-left", path=str(folder), error=str(error))


def files_in(folder: Path) -> set[str]:
    """Return the names of all files below a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def free_name(path: Path) -> Path:
    """Return ``path``, or the first of ``path-2``, ``path-3`` … that does not exist."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def keep_as_old(path: Path) -> Path:
    """Rename a file or folder whose name is needed to the first free one of ``NAME.old``, ``NAME.old-2`` …; return that."""
    kept = free_name(path.with_name(f"{path.name}.old"))
    platform.patiently(path.rename, kept)
    return kept


def _set_aside(folder: Path, *, replace: bool = False) -> Path:
    if not (replace or is_folder(folder)):
        raise CheckpointError(f"{folder} has no {STATE_FILE}, so it is not a checkpoint of this bus: move it away")
    aside = Path(temporary_name(str(folder.parent)))
    with failing(f"cannot remove {folder}"):
        platform.patiently(folder.rename, aside)
        platform.sync_directory(folder.parent)
    return aside


def _link_or_copy(source: str, target: str) -> None:
    try:
        platform.link_file(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
