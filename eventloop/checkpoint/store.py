"""Where checkpoints are: directories of this machine, and stores that fsspec reaches. One way to commit to either."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast
from urllib.parse import unquote, urlsplit

from eventloop.checkpoint import commit
from eventloop.checkpoint.bounds import file_size
from eventloop.checkpoint.digest import CHUNK
from eventloop.checkpoint.remote import RemotePath, RemoteStore
from eventloop.checkpoint.sealed import Pieces, write_sealed

AnyPath = Path | RemotePath
"""A file or a directory, here or elsewhere."""

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class Store(Protocol):
    """How files become durable. Each file appears under its name complete, or not at all.

    What makes files raises CheckpointError from what failed.
    """

    def make(self, directory: Any) -> None:
        """Have a directory, durably."""

    def write(self, path: Any, size: int, pieces: Pieces) -> bytes:
        """Create or replace a checkpoint, ``size`` bytes in all; return its digest."""

    def write_bytes(self, path: Any, data: bytes) -> None:
        """Create or replace a small file."""

    def copy(self, existing: AnyPath, new: Any) -> None:
        """Give what is in the file ``existing`` the second name ``new``, without moving bytes where that is possible."""

    def remove(self, path: Any) -> None:
        """Remove a file; a missing one is fine."""

    def opened(self, path: Any) -> AbstractContextManager[tuple[BinaryIO, int]]:
        """A file, for reading, and its size in bytes.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointDamagedError: it is a FIFO, a socket or a device.
        """

    def files(self, directory: Any) -> list[tuple[Any, float | None]]:
        """The files in a directory, if it is there, and when each was last changed (Unix time in s; None if unknown)."""


class LocalStore:
    """The file system of this machine; see :mod:`eventloop.checkpoint.commit`."""

    def make(self, directory: Path) -> None:
        """Have a directory, durably."""
        commit.make_directory(directory)

    def write(self, path: Path, size: int, pieces: Pieces) -> bytes:
        """Create or replace a checkpoint, ``size`` bytes in all; return its digest."""
        digest = b""

        def fill(descriptor: int) -> None:
            nonlocal digest
            digest = write_sealed(descriptor, pieces)

        commit.commit_file(path, size, fill)
        return digest

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Create or replace a small file."""
        commit.commit_bytes(path, data)

    def copy(self, existing: AnyPath, new: Path) -> None:
        """Link, copy or download ``existing``."""
        if isinstance(existing, RemotePath):
            _download(existing, new)
        else:
            commit.link(existing, new)

    def remove(self, path: Path) -> None:
        """Remove a file; a missing one is fine."""
        commit.remove(path)

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[BinaryIO, int]]:
        """A file, for reading, and its size in bytes."""
        if not path.is_dir():  # of that the system says so
            file_size(path, follow=True)  # opening a FIFO would wait for its writer
        with path.open("rb", buffering=0) as file:
            yield file, os.fstat(file.fileno()).st_size

    def files(self, directory: Path) -> list[tuple[Path, float | None]]:
        """The files in a directory, and when each was last changed."""
        return [(path, _modified(path)) for path in directory.glob("*") if not path.is_dir()]


_LOCAL: Final = LocalStore()
_REMOTE: Final = RemoteStore()


def store_of(place: AnyPath) -> Store:
    """The store of a file or directory."""
    return cast(Store, _REMOTE) if isinstance(place, RemotePath) else _LOCAL


def as_path(location: str | os.PathLike[str] | AnyPath) -> AnyPath:
    """What a user has named: a path, or a URL such as ``s3://bucket/run``. ``file://`` is a path.

    Raises:
        ConfigurationError: fsspec is needed and missing, or nobody knows the protocol.
    """
    if isinstance(location, Path | RemotePath):
        return location
    text = os.fspath(location)
    if not _URL.match(text):
        return Path(text)
    if text.lower().startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return RemotePath(text)


def _download(existing: RemotePath, new: Path) -> None:
    with _REMOTE.opened(existing) as (source, size):

        def fill(descriptor: int) -> None:
            while part := source.read(CHUNK):
                commit.write_all(descriptor, memoryview(part))

        commit.commit_file(new, size, fill)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # removed by another process this very moment
        return None
