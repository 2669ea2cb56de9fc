"""The files of a save: written, durable, under all their names, and the newest one pointed to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from eventloop.checkpoint import AnyPath, RemotePath, StagedTree, store_of, write
from eventloop.events import Progress
from eventloop.offload import collectives_allowed
from eventloop.training.saves.request import OnError

LAST = "last_checkpoint"
"""File in a checkpoint directory (and in the work dir) that holds the way from there to the newest committed checkpoint, or its
URL."""


class SaveJob(msgspec.Struct, eq=False):
    """What the writing lane gets: staged state (or the job before it whose file holds it already) and the names to give it."""

    paths: list[AnyPath]
    progress: Progress
    on_error: OnError
    staged: StagedTree | None = None
    source: SaveJob | None = None
    given_up: str = ""
    """Why it is not to be written any more."""
    parts: Parts | None = None
    """This process's part of what is spread over several."""

    @property
    def first(self) -> bool:
        """True on the process that writes the file."""
        parts = (self.source or self).parts
        return parts is None or parts.first


class Parts(Protocol):
    """What of a checkpoint every process writes itself (see :mod:`eventloop.checkpoint.sharded`)."""

    @property
    def first(self) -> bool:
        """True on the process that writes the file."""

    def commit(self, write: Callable[[], int]) -> int:
        """Write it, and have the first ``write`` the file when all have done so; raises on all where one fails."""


class CheckpointFiles:
    """Writes the files of saves, and remembers which directories there are.

    Args:
        work_dir: of the run; it learns which checkpoint is the newest, wherever that is.
    """

    def __init__(self, work_dir: Path | None) -> None:
        self._work_dir = work_dir
        self._made: set[AnyPath] = set()  # directories that a power cut cannot take away any more

    def made(self, directory: AnyPath) -> bool:
        """Return True if the directory was made (or found) before."""
        return directory in self._made

    def write(self, job: SaveJob, staged: StagedTree, path: AnyPath) -> int:
        """Write what was staged, with this process's part of what is spread over several; return the bytes of the file."""

        def write_file() -> int:
            self._make(path.parent)
            size = write(staged, path).bytes
            self._point_to(path, home=self._work_dir)
            return size

        if job.parts is None:
            return write_file()
        with collectives_allowed():  # on a process group that nobody else uses
            size = job.parts.commit(write_file)
        staged.release()  # written or not: on other ranks nobody else does
        return size

    def copy(self, job: SaveJob, source: AnyPath, path: AnyPath) -> None:
        """Have the file ``source`` under the name ``path``, too; rank 0 sees to it."""
        if job.first:
            self._make(path.parent)
            store_of(path).copy(source, path)
            if source.parent != path.parent:
                self._point_to(path)

    def _point_to(self, path: AnyPath, home: Path | None = None) -> None:
        """Make ``path`` the newest checkpoint of its directory, and of the work dir ``home``."""
        for directory in dict.fromkeys((path.parent, home or path.parent)):
            self._make(directory)
            store_of(directory).write_bytes(directory / LAST, _way(directory, path))

    def _make(self, directory: AnyPath) -> None:
        # One of this machine may have been removed meanwhile. In a store of objects there is nothing to remove.
        if directory in self._made and (isinstance(directory, RemotePath) or directory.is_dir()):
            return
        store_of(directory).make(directory)
        self._made.add(directory)


def _way(directory: AnyPath, path: AnyPath) -> bytes:
    """What ``last_checkpoint`` in ``directory`` says of ``path``: the way from there, or a URL."""
    if directory == path.parent:
        return os.fsencode(path.name)
    return str(path).encode() if isinstance(path, RemotePath) else os.fsencode(os.path.relpath(path, str(directory)))
