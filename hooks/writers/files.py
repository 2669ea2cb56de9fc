"""Files that grow at their end while a run goes on, and small ones that are replaced."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

from eventloop.checkpoint import commit_bytes


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file at its end, and cut off half a line that a process left there when it died. Folders are made.

    Raises:
        OSError: the file cannot be opened, or ``path`` is a symbolic link or not a regular file: lines would go elsewhere.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "this is a symbolic link, which is not followed; remove it", str(path)) from None
    file = os.fdopen(descriptor, "ab")
    try:
        _check_regular(descriptor, path)
        _cut_half_a_line(descriptor)
    except BaseException:
        file.close()
        raise
    return file


def check_in_place(file: IO[Any], path: Path) -> None:
    """Raise FileNotFoundError if ``path`` does not name the open ``file`` any more: what is written to it would be lost."""
    try:
        in_place = os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        in_place = False
    if not in_place:
        raise FileNotFoundError(errno.ENOENT, "the file was removed or replaced while the run wrote to it", str(path))


def sync(file: IO[Any]) -> None:
    """Make what was flushed durable."""
    os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Create or replace a small file; a symbolic link of that name is replaced, not followed. Folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    commit_bytes(path, content)


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
