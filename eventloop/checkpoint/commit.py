"""Durability on a local file system: a file appears under its name complete and on disk, or not at all.

The steps are always the same: write under a temporary name in the same directory → fsync the file → rename it → fsync the
directory. If a step fails before the rename, the temporary file is removed and the name keeps what it had. If only the last
step fails, the new file is in place, but a power cut may undo that. Every ``OSError`` arrives as a ``CheckpointError`` that is
chained from it.

A checkpoint ends with its digest, which guards against damage (torn writes, flipped bits), not against forgery. Measured on an
EPYC core with SHA extensions: crc32 4.1 GB/s, sha1 1.9, sha256 1.8, blake2b 0.9, md5 0.8; without those extensions sha256 is
slower than a disk. All release the GIL. CRC-32 finds every flipped bit and every burst of up to 32 bits, and misses one in
2**32 others.

A process that is killed can leave a temporary file behind; its name begins with ``TEMPORARY_PREFIX``.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from trainbus.eventloop import platform
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.platform import sync_directory
from trainbus.eventloop.user_errors import add_note, contextmanager, text_of

TEMPORARY_PREFIX: Final = ".trainbus-"
Made = TypeVar("Made")

CHUNK: Final = 16 << 20
"""Bytes per piece: so many that a background writer seldom asks for the GIL, so few that verifying needs little memory."""

DIGEST_BYTES: Final = 4
Pieces = tuple[bytes, memoryview, bytes]
"""A file without its digest: header, tensors, tree."""

_steps = 0

# Below this, the digest takes no longer than starting a thread and syncing twice.
_ALONE: Final = 8 << 20


def note_step() -> None:
    """Count a step of a writer: a piece of a file is written, a file is synced, a part is uploaded."""
    global _steps
    _steps += 1  # two threads may count one step together; the number has changed nevertheless


def steps_made() -> int:
    """Return the steps that writers in this process have made: while the number grows, they do not hang."""
    return _steps


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
            # O_EXCL: never write into a file that is there already.
            descriptor = platform.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                result = fill(descriptor)
                platform.sync(descriptor)
                note_step()
            finally:
                os.close(descriptor)
            platform.patiently(os.replace, temporary, name)
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
    done = platform.write_together(descriptor, parts) if len(parts) > 1 and size <= CHUNK else 0
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
                note_step()
        done = max(0, done - len(part))


def chunks(data: memoryview | bytes) -> Iterator[memoryview]:
    """Yield the bytes of ``data`` in pieces of at most ``CHUNK``, without copying."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


def crc32(parts: Iterable[memoryview | bytes], crc: int = 0) -> int:
    """Return the CRC-32 of all parts together, or of what has ``crc`` and the parts."""
    for part in parts:
        for chunk in chunks(part) if len(part) > CHUNK else (part,):
            crc = zlib.crc32(chunk, crc)
    return crc


def readable(crc: int) -> str:
    """Return a digest as text, ``crc32:`` and eight hex digits."""
    return f"crc32:{crc:08x}"


def write_sealed(descriptor: int, pieces: Pieces) -> int:
    """Write the pieces and their digest to a file descriptor; return the digest."""
    if sum(map(len, pieces)) < _ALONE:
        crc = crc32(pieces)
        write_all(descriptor, *pieces, crc.to_bytes(DIGEST_BYTES, "little"))
    else:
        write_all(descriptor, *pieces)
        crc = _digest_during_sync(descriptor, pieces)
        write_all(descriptor, crc.to_bytes(DIGEST_BYTES, "little"))
    return crc


def _digest_during_sync(descriptor: int, pieces: Pieces) -> int:
    # The digest is made while the disk works. Beside the writing it would be one more busy thread, and on few cores the
    # training pays for that. Measured on 800 MB: 0.8 times the seconds, too.
    # The digest has the thread, not the sync: after Ctrl-C, or when the sync fails, this thread need not wait for the other.
    made: list[int] = []
    thread = threading.Thread(target=lambda: made.append(crc32(pieces)), name="trainbus-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down (python/cpython#104690), and the last checkpoint matters most
        return crc32(pieces)
    # Of the data so far; the caller syncs the rest, once the file is complete.
    platform.sync_data(descriptor)
    note_step()
    thread.join()
    return made[0] if made else crc32(pieces)  # if it failed in the thread, this raises its error


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
    # Not derived from the final name: that one may be as long as the file system allows.
    return os.path.join(directory, f"{TEMPORARY_PREFIX}{platform.unique_name()}.tmp")  # noqa: PTH118


def discard(name: str, remove: Callable[[str], object], error: BaseException) -> None:
    """Remove the unfinished file ``name``; if that fails, add a note to ``error``."""
    try:
        platform.patiently(remove, name)
    except FileNotFoundError:
        pass
    except Exception as second:  # noqa: BLE001 - the first failure is the one to report
        add_note(error, f"and the unfinished file {name} could not be removed: {text_of(second)}")
