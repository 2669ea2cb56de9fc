"""For each checkpoint that Ray is told, a folder with its file.

Ray's checkpoints are folders, which it deletes by ``num_to_keep``; and it refuses to start again if one that it knows is gone.
So the file of the run keeps its own name, and Ray gets a folder ``checkpoint_iter_50`` with a hard link to it. A store has no
links: there the store copies the file, and only the newest file of the run stays beside its folder. Nothing here removes a
folder that Ray knows.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

from trainbus.eventloop.checkpoint import (
    AnyPath,
    RemotePath,
    checkpoints_in,
    free_name,
    link,
    list_directories,
    list_files,
    plain_tree,
    sharded_in,
)
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.platform import patiently
from trainbus.eventloop.training.saves.discover import is_candidate, peek

_PREFIX: Final = "checkpoint_"
_UNFINISHED: Final = ".trainbus-checkpoint_"
_SEARCHED: Final = 3
"""Number of folders in a store that a resume looks at, beside the newest file."""

log = get_logger()

Saved = list[tuple[AnyPath, int]]
"""Files of checkpoints with their iterations, oldest first."""


class RayFolders(Protocol):
    """The folders of checkpoints in Ray's storage path."""

    def place(self, file: AnyPath) -> AnyPath:
        """Return the folder for a file that is durable now, before the retention of the run may remove it.

        Raises:
            OSError: the file is gone, or the folder cannot be written.
            CheckpointError: likewise.
        """

    def fill(self, folder: AnyPath, file: AnyPath) -> None:
        """Complete a folder, before Ray is told of it; raises like ``place``."""

    def discard(self, folder: AnyPath) -> None:
        """Remove a folder that Ray does not know."""

    def told(self, folder: AnyPath, file: AnyPath) -> None:
        """Note that Ray was told of a folder of a file."""

    def pruned(self) -> Iterator[AnyPath]:
        """Yield the files that the run needs no more, because Ray keeps them or has deleted their folders."""

    def adopt(self, known: Mapping[str, int], directory: AnyPath, newest: int, *, prunes: bool) -> tuple[Saved, list[AnyPath]]:
        """Compare the checkpoints in ``directory`` with those that Ray knows; remove folders that it does not know.

        Args:
            known: the names of the folders that Ray knows, and their iterations.
            directory: where the run saves.
            newest: the iterations that the run goes on from; files with more are left alone.
            prunes: True if Ray deletes checkpoints.

        Returns:
            The files that Ray forgot, which are newer than what it knows; and the files that the run needs no more. Both only
            of trainbus's own format: where another trainer saves, it resumes, too.
        """


class LinkedFolders:
    """Folders with hard links, on a file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._earlier = [*folder.iterdir()]  # before this run makes any
        self._files: dict[Path, AnyPath] = {}  # the folders that Ray knows, and the files that they are further names of

    def place(self, file: AnyPath) -> Path:
        """Return the folder; see :class:`RayFolders`."""
        if not isinstance(file, Path):
            raise CheckpointError(f"{file} is in a store, and Ray's storage path is not")
        found = free_name(self._folder / f"{_PREFIX}{file.stem}")
        unfinished = found.with_name(f"{_UNFINISHED}{file.stem}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for source, name in _parts(file):
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            link(source, unfinished / name)
        patiently(unfinished.rename, found)
        return found

    def fill(self, folder: AnyPath, file: AnyPath) -> None:
        """Do nothing: ``place`` has linked the file."""

    def discard(self, folder: AnyPath) -> None:
        """Remove the folder."""
        shutil.rmtree(str(folder), ignore_errors=True)

    def told(self, folder: AnyPath, file: AnyPath) -> None:
        """Note that Ray knows the folder."""
        self._files[Path(str(folder))] = file

    def pruned(self) -> Iterator[AnyPath]:
        """Yield the files that the run needs no more."""
        for folder in [one for one in self._files if not one.exists()]:
            yield self._files.pop(folder)

    def adopt(self, known: Mapping[str, int], directory: AnyPath, newest: int, *, prunes: bool) -> tuple[Saved, list[AnyPath]]:
        """Compare with what Ray knows."""
        for folder in self._earlier:
            if folder.name.startswith(_UNFINISHED):
                self.discard(folder)
            elif folder.name.startswith(_PREFIX) and folder.is_dir() and (file := _file_in(folder)) is not None:
                if folder.name in known:
                    self.told(folder, directory / file.name)
                else:
                    self.discard(folder)
        ours, last = _ours(directory), max(known.values(), default=-1)
        forgotten = [(path, done) for done, path in sorted(ours.items()) if last < done <= newest]
        deleted = [path for done, path in ours.items() if prunes and 0 <= done < last and done not in known.values()]
        return forgotten, deleted


class CopiedFolders:
    """Folders with copies that the store itself makes, which take no way over this machine."""

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        self._earlier = [one for one in list_directories(folder) if one.name.startswith(_PREFIX)]
        self._files: list[AnyPath] = []  # of the folders that Ray was told of

    def place(self, file: AnyPath) -> AnyPath:
        """Return the folder; see :class:`RayFolders`."""
        return self._folder / f"{_PREFIX}{file.stem}"

    def fill(self, folder: AnyPath, file: AnyPath) -> None:
        """Complete the folder."""
        if file.parent == folder:
            return
        if not isinstance(folder, RemotePath):
            raise TypeError(folder)
        for source, name in _parts(file):
            new = folder / name
            if not (isinstance(source, RemotePath) and _copied(source, new)):
                link(source, new)  # of another trainer, on this machine

    def discard(self, folder: AnyPath) -> None:
        """Remove the folder."""
        if isinstance(folder, RemotePath) and (files := [*_below(folder)]):
            folder.remove_directory(files)

    def told(self, folder: AnyPath, file: AnyPath) -> None:
        """Note that Ray knows the folder."""
        if file.parent == self._folder:
            self._files.append(file)

    def pruned(self) -> Iterator[AnyPath]:
        """Yield the files that the run needs no more."""
        while len(self._files) > 1:
            yield self._files.pop(0)

    def adopt(self, known: Mapping[str, int], directory: AnyPath, newest: int, *, prunes: bool) -> tuple[Saved, list[AnyPath]]:
        """Compare with what Ray knows."""
        ours, last = _ours(directory), max(known.values(), default=-1)
        forgotten = {done: path for done, path in ours.items() if last < done <= newest}
        for folder in self._earlier:
            if folder.name in known:
                continue
            # A copy that was not complete has its file beside it still.
            files = {} if any(folder == self.place(path) for path in ours.values()) else _ours(folder)
            if any(last < done <= newest for done in files):
                forgotten |= files
            elif not files or max(files) <= newest:
                self.discard(folder)
        self._files = [path for done, path in sorted(ours.items()) if done in known.values()]
        deleted = [path for done, path in ours.items() if prunes and 0 <= done < last and done not in known.values()]
        return [(path, done) for done, path in sorted(forgotten.items())], deleted


def searched_folders(folder: RemotePath) -> list[AnyPath]:
    """Return the newest of Ray's folders in a store, by the numbers in their names, for a resume."""
    folders = [one for one in list_directories(folder) if re.fullmatch(rf"{_PREFIX}\D*\d+", one.name)]
    return sorted(folders, key=lambda one: int(re.sub(r"\D", "", one.name)))[-_SEARCHED:]


def _parts(file: AnyPath) -> Iterator[tuple[AnyPath, str]]:
    """Yield the files of a checkpoint, which may be a folder of another trainer, each with its name in Ray's folder."""
    if isinstance(file, Path) and file.is_dir():
        inner = sorted(one for one in file.rglob("*") if one.is_file())
        yield from ((one, f"{file.name}/{one.relative_to(file).as_posix()}") for one in inner)
        return
    yield file, file.name
    if is_candidate(file) and (shards := sharded_in(plain_tree(file))) is not None:  # beside the file, which names them so
        for part, _ in list_files(file.with_name(shards)):
            yield part, f"{shards}/{part.name}"


def _copied(source: RemotePath, new: RemotePath) -> bool:
    try:
        source.copy_to(new)
    except CheckpointError as error:
        log.debug("a store copies no files by itself", error=str(error))
        return False
    return True


def _below(folder: RemotePath) -> Iterator[AnyPath]:
    for one in list_directories(folder):
        yield from (path for path, _ in list_files(one))
    yield from (path for path, _ in list_files(folder))


def _ours(directory: AnyPath) -> dict[int, AnyPath]:
    """Return the checkpoints in a directory by their iterations. A best file counts only where the state has no other one."""
    found: dict[int, AnyPath] = {}
    for path in checkpoints_in(directory):
        if (done := _iterations(path)) not in found or not path.name.startswith("best_"):
            found[done] = path
    return found


def _file_in(folder: Path) -> Path | None:
    """Return the file or folder in a folder that :meth:`LinkedFolders.place` made; None for another folder."""
    found = [path for path in folder.iterdir() if folder.name.startswith(f"{_PREFIX}{path.stem}")]
    return found[0] if len(found) == 1 else None


def _iterations(file: AnyPath) -> int:
    try:
        return peek(file).iter
    except (CheckpointError, OSError):
        return -1  # damaged, or of another trainer
