"""Durability on a local file system: a file appears under its name complete and on disk, or not at all.

The steps are always the same: write under a temporary name in the same directory → fsync the file → rename it → fsync the
directory. If a step fails before the rename, the temporary file is removed and the name keeps what it had. If only the last
step fails, the new file is in place, but a power cut may undo that. Every ``OSError`` arrives as a ``CheckpointError`` that is
chained from it.

A process that is killed can leave a temporary file behind; its name begins with ``TEMPORARY_PREFIX``.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from eventloop.errors import CheckpointError

TEMPORARY_PREFIX: Final = ".trainbus-"
Made = TypeVar("Made")

CHUNK: Final = 16 << 20
"""Bytes per piece: so many that a background writer seldom asks for the GIL, so few that verifying needs little memory."""


def commit_file(path: str | os.PathLike[str], size: int, fill: Callable[[int], Made]) -> Made:
    """Create or replace the file at ``path``, in a directory that exists; return the result of ``fill``.

    ``fill`` is called with a file descriptor and writes the content, ``size`` bytes (for the error message).
    """
    # System calls without pathlib and context managers: this runs beside the training, and Python code holds the GIL.
    name = os.fspath(path)
    directory = os.path.dirname(name)  # noqa: PTH120
    temporary = temporary_name(directory)
    try:
        try:
            # O_EXCL: never write into a file that is there already. 0o666: the umask decides, as with open().
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                result = fill(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, name)  # noqa: PTH105
        except BaseException as error:  # also after KeyboardInterrupt: gigabytes must not stay behind
            discard(temporary, os.unlink, error)
            raise
        sync_directory(directory or os.curdir)
    except OSError as error:
        raise _failed(f"cannot write {name} ({size:,} bytes)", error) from error
    return result


def write_all(descriptor: int, *parts: memoryview | bytes) -> None:
    """Write all of ``parts``, in bounded pieces and however few bytes the system takes at a time."""
    size = sum(map(len, parts))
    # Small parts by one system call: after each one a thread waits for the GIL, and the training for that thread.
    done = os.writev(descriptor, parts) if len(parts) > 1 and size <= CHUNK else 0
    if done == size:
        return
    for part in parts:
        for chunk in chunks(memoryview(part)[done:]):
            rest = chunk
            while rest:
                written = os.write(descriptor, rest)
                if written == 0:
                    raise OSError(errno.EIO, "the file system accepts no more bytes and reports no error")
                rest = rest[written:]
        done = max(0, done - len(part))


def chunks(data: memoryview | bytes) -> Iterator[memoryview]:
    """Yield the bytes of ``data`` in pieces of at most ``CHUNK``, without copying."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


@contextmanager
def failing(what: str, kind: type[Exception] = OSError, but: type[Exception] = CheckpointError) -> Iterator[None]:
    """Turn errors of type ``kind`` into a CheckpointError that begins with ``what``, except those of type ``but``."""
    try:
        yield
    except (CheckpointError, but):
        raise
    except kind as error:
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{what}: {str(error) or type(error).__name__}")


def temporary_name(directory: str) -> str:
    """Return a free name in ``directory``."""
    # Not derived from the final name: that one may be as long as the file system allows. Unlike random bytes, the thread and
    # the time take no system call.
    unique = f"{os.getpid():x}-{threading.get_ident():x}-{time.time_ns():x}"
    return os.path.join(directory, f"{TEMPORARY_PREFIX}{unique}.tmp")  # noqa: PTH118


def discard(name: str, remove: Callable[[str], object], error: BaseException) -> None:
    """Remove the temporary file ``name``; if that fails, add a note to ``error``."""
    try:
        remove(name)
    except FileNotFoundError:
        pass
    except Exception as second:  # noqa: BLE001 - the first failure is the one to report
        error.add_note(f"and the temporary file {name} could not be removed: {second}")


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)
