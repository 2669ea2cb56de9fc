"""Durability: a file appears under its name complete and on disk, or not at all.

The dance is always the same: write under a temporary name in the same directory → fsync the file → rename over the name
→ fsync the directory. Whatever fails up to the rename, the temporary file is removed and the name keeps what it had;
if only the last step fails, the new file is in place but a power cut may undo that. Failures of the file system arrive
as `CheckpointError` chained from the original `OSError` (``error.__cause__``).

A process that is killed can leave a temporary file behind; its name begins with `TEMPORARY_PREFIX`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from eventloop.checkpoint.digest import chunks
from eventloop.errors import CheckpointError

TEMPORARY_PREFIX: Final = ".trainbus-"
_Path = str | os.PathLike[str]


def commit_file(path: _Path, size: int, fill: Callable[[int], None]) -> None:
    """Create or replace the file at `path` with what `fill` writes to the file descriptor it is given.

    Args:
        path: where; its directory must exist.
        size: how many bytes `fill` will write, for the error message.
        fill: writes the content.

    Raises:
        CheckpointError: from the `OSError` of the step that failed.
    """
    # Plain calls of the system, no pathlib: it runs beside the training, and holds the GIL while it is in Python.
    name = os.fspath(path)
    directory = os.path.dirname(name)  # noqa: PTH120
    try:
        with _temporary(directory) as temporary:
            # O_EXCL: never write into what someone else put there. 0o666: the umask decides, as with open().
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                fill(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, name)  # noqa: PTH105
        _sync_directory(directory or os.curdir)
    except OSError as error:
        raise CheckpointError(f"cannot write {name} ({size:,} bytes): {error}") from error


def commit_bytes(path: _Path, data: bytes) -> None:
    """Create or replace a small file, atomically and durably.

    Raises:
        CheckpointError: from the `OSError` of the step that failed.
    """
    commit_file(path, len(data), lambda descriptor: write_all(descriptor, memoryview(data)))


def link(existing: _Path, new: _Path) -> None:
    """Give the file `existing` the second name `new`, replacing what had it; a copy where hard links are not possible.

    Raises:
        CheckpointError: from the `OSError` of the step that failed.
    """
    existing, new = Path(existing), Path(new)
    if not _link(existing, new):
        _copy(existing, new)


def remove(path: _Path) -> None:
    """Remove a file, durably. A missing one is fine.

    Raises:
        CheckpointError: from the `OSError` of the step that failed.
    """
    path = Path(path)
    with _named(f"cannot remove {path}"):
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)


def make_directory(directory: _Path) -> None:
    """Make a directory and those above it, durably. One that is there is fine.

    What is there already is synced into its parents as well, since whoever made it may not have done so; but for those
    parents that this process may not read.

    Raises:
        CheckpointError: from the `OSError` of the step that failed.
    """
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - resolve() would follow links
    with _named(f"cannot make the directory {directory}"):
        for each in (*reversed(path.parents), path):
            made = _make(each)
            if each == each.parent or (not made and each.is_mount()):
                continue
            try:
                _sync_directory(each.parent)
            except PermissionError:
                if made:
                    raise


def _make(directory: Path) -> bool:
    if directory.is_dir():
        return False
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise
        return False  # by another process, this very moment
    return True


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`, in bounded pieces and however few bytes the system takes at a time.

    Raises:
        OSError: the system refused, or took nothing.
    """
    for chunk in chunks(data):
        rest = chunk
        while rest:
            written = os.write(descriptor, rest)
            if written == 0:
                raise OSError(errno.EIO, "the file system takes no more bytes and does not say why")
            rest = rest[written:]


def _link(existing: Path, new: Path) -> bool:
    with _named(f"cannot give {existing} the name {new}"):
        # rename() between two names of one file does nothing, and would leave the temporary one.
        if not (new.exists() and new.samefile(existing)):
            with _temporary(str(new.parent)) as name:
                temporary = Path(name)
                try:
                    temporary.hardlink_to(existing)
                except FileNotFoundError:
                    raise
                except OSError:
                    return False  # another file system, or one without hard links
                temporary.replace(new)
        _sync_directory(new.parent)
        return True


def _copy(existing: Path, new: Path) -> None:
    def fill(descriptor: int) -> None:
        with existing.open("rb") as source, os.fdopen(descriptor, "wb", closefd=False) as target:
            shutil.copyfileobj(source, target, 1 << 20)

    with _named(f"cannot copy {existing}"):
        size = existing.stat().st_size
    commit_file(new, size, fill)


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from error


class _temporary:  # noqa: N801 - a context manager
    """A free name in `directory`; nothing has it any more when the block ends by an exception."""

    def __init__(self, directory: str) -> None:
        # Not derived from the final name: that one may be as long as the file system allows.
        self._name = os.path.join(directory, f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}.tmp")  # noqa: PTH118

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        try:  # also after KeyboardInterrupt: gigabytes must not stay behind
            os.unlink(self._name)  # noqa: PTH108
        except FileNotFoundError:
            pass
        except OSError as second:
            error.add_note(f"and the temporary file {self._name} could not be removed: {second}")


def _sync_directory(directory: _Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)
