"""Files in the work dir: one that grows while a run goes on, small ones that are replaced, the id of a tracked run."""

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
    """A file that lines are appended to. Folders are made.

    Opening cuts off half a line at the end, which a process leaves there when it dies.

    Raises:
        OSError: the file cannot be opened, or ``path`` is a symbolic link or not a regular file: lines would go elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.open()

    def write(self, line: bytes) -> None:
        """Append a line, which ends in a newline."""
        self._file.write(line)

    def flush(self, *, durable: bool = False) -> None:
        """Hand the lines to the operating system, with ``durable`` to the disk.

        Raises:
            FileNotFoundError: the file was removed or replaced, so lines would be lost.
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
            raise OSError(error.errno, "this is a symbolic link, which is not followed; remove it", str(path)) from None
        self._file = os.fdopen(descriptor, "ab")
        try:
            _check_regular(descriptor, path)
            _cut_half_a_line(descriptor)
        except BaseException:
            self._file.close()
            raise


class FileWriter(Writer):
    """Base of writers of one growing file in the work dir. Without a work dir they write nothing."""

    def __init__(self, filename: str, interval: int | None) -> None:
        super().__init__(interval)
        self.filename = filename
        self.directory: Path | None = None
        self._file: GrowingFile | None = None

    def open(self, run: RunFacts) -> None:
        self.directory = run.work_dir

    def file(self, kind: type[F], directory: Path) -> F:
        """Return the file, opened as ``kind`` when it is first asked for."""
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
    """Create or replace a small file; a symbolic link of that name is replaced, not followed. Folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    commit_bytes(path, content)


def run_id(work_dir: Path | None, filename: str, make: Callable[[], str], exists: Callable[[str], bool] | None = None) -> str:
    """Return the id of a tracking tool's run for a work dir, so that a resumed run goes on with it.

    Args:
        work_dir: None for an id that is not noted.
        filename: of the file in the work dir that holds the id.
        make: returns a new id.
        exists: tells whether the tool still has the run of a noted id; None takes any.
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
        raise OSError(errno.EINVAL, "this is not a regular file; remove it", str(path))


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
