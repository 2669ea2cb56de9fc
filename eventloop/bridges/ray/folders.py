"""``RayFolders``: for each checkpoint that Ray is told, a folder with a further name of its file.

Ray's checkpoints are folders, which it deletes by ``num_to_keep``; and it refuses to start again if one that it knows is gone.
So the file of the run keeps its own name, and Ray gets a folder ``checkpoint_iter_50`` with a hard link to it. Nothing here
removes a folder that Ray knows.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from eventloop.checkpoint import checkpoints_in, free_name, link, outline, sharded_in
from eventloop.errors import CheckpointError
from eventloop.log import get_logger
from eventloop.training.saves.discover import is_candidate, peek

_PREFIX: Final = "checkpoint_"
_UNFINISHED: Final = ".trainbus-checkpoint_"

log = get_logger()


class RayFolders:
    """The folders of checkpoints in Ray's storage path, ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._earlier = [*folder.iterdir()]  # before this run makes any
        self._files: dict[Path, Path] = {}  # the folders that Ray knows, and the files that they are further names of

    def make(self, file: Path) -> Path:
        """Make the folder of a checkpoint, which another trainer may have written; return its path.

        Raises:
            OSError: the file is gone, or the folder cannot be written.
            CheckpointError: likewise.
        """
        found = free_name(self._folder / f"{_PREFIX}{file.stem}")
        unfinished = found.with_name(f"{_UNFINISHED}{file.stem}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        link(file, unfinished / file.name)
        if (
            is_candidate(file) and (shards := sharded_in(outline(file))) is not None
        ):  # the file names this directory, relative to itself
            (unfinished / shards).mkdir()
            for part in (file.parent / shards).iterdir():
                link(part, unfinished / shards / part.name)
        unfinished.rename(found)
        return found

    def discard(self, folder: Path) -> None:
        """Remove a folder that Ray does not know."""
        shutil.rmtree(folder, ignore_errors=True)

    def told(self, folder: Path, file: Path) -> None:
        """Note that Ray was told of a folder of a file."""
        self._files[folder] = file

    def pruned(self) -> Iterator[Path]:
        """Yield the files whose folders Ray has deleted since."""
        for folder in [one for one in self._files if not one.exists()]:
            yield self._files.pop(folder)

    def adopt(
        self, known: Collection[Path], directory: Path, newest: int, *, prunes: bool
    ) -> tuple[list[tuple[Path, int]], list[Path]]:
        """Compare the checkpoints in ``directory`` with those that Ray knows; remove folders that it does not know.

        Args:
            known: the folders that Ray knows.
            directory: the work dir of the run.
            newest: the iterations that the run goes on from; files with more are left alone.
            prunes: True if Ray deletes checkpoints.

        Returns:
            The files that Ray forgot, which are newer than what it knows, with their iterations, oldest first; and the files
            that it has deleted. Both only of trainbus's own format: where another trainer saves, it resumes, too.
        """
        of_ray: set[int] = set()
        for folder in self._earlier:
            if folder.name.startswith(_UNFINISHED):
                self.discard(folder)
            elif folder.name.startswith(_PREFIX) and folder.is_dir() and (file := _file_in(folder)) is not None:
                if folder in known:
                    of_ray.add(_iterations(file))
                    self.told(folder, directory / file.name)
                else:
                    self.discard(folder)
        ours: dict[int, Path] = {}
        for path in checkpoints_in(directory):
            if isinstance(path, Path) and ((done := _iterations(path)) not in ours or not path.name.startswith("best_")):
                ours[done] = path
        last = max(of_ray, default=-1)
        forgotten = [(path, done) for done, path in sorted(ours.items()) if last < done <= newest]
        deleted = [path for done, path in ours.items() if prunes and 0 <= done < last and done not in of_ray]
        return forgotten, deleted


def _file_in(folder: Path) -> Path | None:
    """Return the file or folder in a folder that :meth:`RayFolders.make` made; None for another folder."""
    found = [path for path in folder.iterdir() if folder.name.startswith(f"{_PREFIX}{path.stem}")]
    return found[0] if len(found) == 1 else None


def _iterations(file: Path) -> int:
    try:
        return peek(file).iter
    except (CheckpointError, OSError):
        return -1  # damaged, or of another trainer
