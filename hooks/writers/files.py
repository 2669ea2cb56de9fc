"""Files in the work dir: files that grow, small files that are replaced, and the id of a tracked run."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eventloop.checkpoint import commit_bytes
from hooks.writers.base import RunFacts, Writer

F = TypeVar("F", bound="GrowingFile")


class GrowingFile:
    """A file to append lines to. Opening makes the folders, and cuts off an incomplete last line of a killed process.

    Raises:
        OSError: the file cannot be opened, or ``path`` is a symbolic link or not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.open()

    def write(self, line: bytes) -> None:
        """Append a line that ends in a newline."""
        self._file.write(line)

    def flush(self, *, durable: bool = False) -> None:
        """Flush the lines to the operating system; with ``durable``, to the disk.

        Raises:
            FileNotFoundError: the file was removed or replaced.
        """
        try:
            in_place = os.path.samestat(os.fstat(self._file.fileno()), self._path.lstat())
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or replaced while the run wrote to it", str(self._path))
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def open(self) -> None:
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(error.errno, "the file is a symbolic link, which is not followed; remove it", str(path)) from None
        self._file = os.fdopen(descriptor, "ab")
        try:
            _check_regular(descriptor, path)
            _cut_half_a_line(descriptor)
        except BaseException:
            self._file.close()
            raise


class FileWriter(Writer):
    """Base class of writers of one growing file in the work dir. Without a work dir they write nothing."""

    def __init__(self, filename: str, interval: int | None) -> None:
        super().__init__(interval)
        self.filename = filename
        self.directory: Path | None = None
        self._file: GrowingFile | None = None

    def open(self, run: RunFacts) -> None:
        self.directory = run.work_dir

    def file(self, kind: type[F], directory: Path) -> F:
        """Return the file; the first call opens it as ``kind``."""
        if not isinstance(self._file, kind):
            self._file = kind(directory / self.filename)
        return self._file

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush(durable=True)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def replace(path: Path, content: bytes) -> None:
    """Create or replace a small file and its folders; a symbolic link is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    commit_bytes(path, content)


def run_id(work_dir: Path | None, filename: str, make: Callable[[], str], exists: Callable[[str], bool] | None = None) -> str:
    """Return the id of a tracking tool's run, so that a resumed run continues it.

    Args:
        work_dir: the work dir, or None to store no id.
        filename: name of the file in the work dir that holds the id.
        make: function that returns a new id.
        exists: function that returns True if the tool still has the run of a stored id; None accepts every id.
    """
    path = None if work_dir is None else work_dir / filename
    known = path.read_text(encoding="utf-8").strip() if path is not None and path.is_file() else ""
    if known and (exists is None or exists(known)):
        return known
    made = make()
    if path is not None:
        replace(path, f"{made}\n".encode())
    return made


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "the path is not a regular file; remove it", str(path))


def _cut_half_a_line(descriptor: int) -> None:
    size = end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - 4096)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
