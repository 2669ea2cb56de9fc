"""Access checkpoints on a local file system, or in a store that fsspec reaches, by the same functions.

Those that change files raise CheckpointError from the error of the step that failed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeGuard
from urllib.parse import unquote, urlsplit

from trainbus.eventloop import platform
from trainbus.eventloop.checkpoint.commit import (
    CHUNK,
    Pieces,
    commit_file,
    discard,
    failing,
    temporary_name,
    write_all,
    write_sealed,
)
from trainbus.eventloop.checkpoint.folder import link_folder, remove_folder
from trainbus.eventloop.checkpoint.remote import RemotePath
from trainbus.eventloop.errors import CheckpointDamagedError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()

AnyPath = Path | RemotePath
"""A file or a directory, on this machine or in a store."""
AsPath = str | os.PathLike[str] | AnyPath
"""What ``as_path`` takes."""

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_LONGEST_NAME: Final = 255
_KINDS: Final = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def as_path(location: AsPath) -> AnyPath:
    """Return the path for a user's path or URL, such as ``s3://bucket/run``. ``file://`` and ``file:/`` are local paths.

    A local path that begins with ``~`` is in the home directory.

    Raises:
        ConfigurationError: fsspec is needed and missing, or the protocol is unknown.
    """
    if isinstance(location, RemotePath):
        return location
    if isinstance(location, Path):
        return Path(os.path.expanduser(location))  # noqa: PTH111 - Path.expanduser() raises for an unknown user
    text = os.path.expanduser(os.fspath(location))  # noqa: PTH111
    if re.match(r"file:/(?!/)", text, re.IGNORECASE):  # a URL that another program has normalised; it decodes nothing
        return Path(platform.path_of_url(text[len("file:") :]))
    if not _URL.match(text):
        return Path(text)
    if text.lower().startswith("file://"):
        return Path(platform.path_of_url(unquote(urlsplit(text).path)))
    return RemotePath(text)


def write_pieces(path: AnyPath, size: int, pieces: Pieces, *, create: bool = False) -> int:
    """Create or replace a checkpoint of ``size`` bytes, digest included; return the digest. For ``create`` see ``link``."""
    if isinstance(path, RemotePath):
        with _aside() as file:
            crc = commit_file(file, size, lambda descriptor: write_sealed(descriptor, pieces))
            path.upload(file, create=create)
        return crc
    return commit_file(path, size, lambda descriptor: write_sealed(descriptor, pieces))


def commit_bytes(path: AsPath, data: bytes) -> None:
    """Create or replace a small file, atomically and durably."""
    path = as_path(path)
    if isinstance(path, RemotePath):
        path.write_bytes(data)
    else:
        commit_file(path, len(data), lambda descriptor: write_all(descriptor, data))


def link(existing: AsPath, new: AsPath, *, create: bool = False) -> None:
    """Give the file or folder ``existing`` the second name ``new``, replacing what had it.

    It is a hard link if possible (in a folder, of each file), else a copy. A store is not asked to copy: buckets with enforced
    conditional writes refuse that. With ``create`` it must be new in a store with conditional writes.
    """
    existing, new = as_path(existing), as_path(new)
    if isinstance(existing, Path) and isinstance(new, Path) and existing.is_dir():
        link_folder(existing, new)
        return
    if isinstance(existing, RemotePath):
        if isinstance(new, Path):
            _download(existing, new)
        else:
            with _aside() as file:
                _download(existing, file)
                new.upload(file, create=create)
    elif isinstance(new, RemotePath):
        new.upload(existing, create=create)
    else:
        with failing(f"cannot give {existing} the name {new}"):
            if not _link(existing, new):
                with existing.open("rb", buffering=0) as source:
                    _fill(new, source, existing.stat().st_size)


def _download(existing: RemotePath, new: Path) -> None:
    with failing(f"cannot copy {existing}"), existing.opened() as (source, size):
        _fill(new, source, size)


def _fill(new: Path, source: BinaryIO, size: int) -> None:
    def fill(descriptor: int) -> None:
        for part in iter(lambda: source.read(CHUNK), b""):
            write_all(descriptor, part)

    commit_file(new, size, fill)


@contextmanager
def _aside() -> Iterator[Path]:
    """Yield a path in a new directory on this machine, which is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="trainbus-") as directory:
        yield Path(directory, "file")


def _link(existing: Path, new: Path) -> bool:
    """Make a hard link; return False where that is not possible."""
    # rename() between two names of one file does nothing, and would leave the temporary one.
    if not (new.exists() and new.samefile(existing)):
        temporary = Path(temporary_name(str(new.parent)))
        try:
            try:
                platform.link_file(existing, temporary)
            except FileNotFoundError:
                raise
            except OSError:
                return False  # another file system, or one without hard links
            platform.patiently(temporary.replace, new)
        except BaseException as error:
            discard(str(temporary), os.unlink, error)
            raise
    platform.sync_directory(new.parent)
    return True


def symlink(existing: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Give a local file or folder the second name ``new`` by a symbolic link, or by ``link`` where that is not possible.

    What had the name is replaced; a folder is removed. Nothing happens if ``existing`` is missing.
    """
    existing, new = Path(existing), Path(new)
    if not existing.exists():
        return
    if new.is_dir() and not new.is_symlink():
        platform.patiently(shutil.rmtree, new)
        log.info("removed a folder whose name another one gets", path=str(new))
    temporary = Path(temporary_name(str(new.parent)))
    try:
        temporary.symlink_to(os.path.relpath(existing, new.parent))
    except OSError:  # a system without them
        link(existing, new)
        return
    with failing(f"cannot link {new} to {existing}"):
        platform.patiently(temporary.replace, new)
        platform.sync_directory(new.parent)


def remove(path: AsPath) -> None:
    """Remove a file, or a folder that is a checkpoint, durably. A missing one is fine."""
    path = as_path(path)
    if isinstance(path, RemotePath):
        path.remove()
        return
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
        return
    with failing(f"cannot remove {path}"):
        platform.patiently(path.unlink, missing_ok=True)
        platform.sync_directory(path.parent)


def make_directory(directory: AsPath) -> None:
    """Create a directory and its parents, durably. An existing directory is fine.

    Existing local directories are synced into their parents as well, since their creator may not have done so. Parents that
    this process may not read are left out.
    """
    directory = as_path(directory)
    if isinstance(directory, RemotePath):
        directory.make_directory()
        return
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - resolve() would follow links
    with failing(f"cannot make the directory {directory}"):
        for each in (*reversed(path.parents), path):
            missing = not each.is_dir()
            if missing:
                each.mkdir(exist_ok=True)  # another process may make it at the same moment
            if each == each.parent or (not missing and os.path.ismount(each)):
                continue
            try:
                platform.sync_directory(each.parent)
            except PermissionError:
                if missing:
                    raise


@contextmanager
def open_file(path: AnyPath) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file for reading; yields it with its size in bytes.

    Raises:
        CheckpointDamagedError: it is a FIFO, a socket or a device.
        CheckpointError: the store does not answer.
    """
    if isinstance(path, RemotePath):
        with path.opened() as opened:
            yield opened
        return
    if not path.is_dir():  # of a directory the system says so
        file_size(path, follow=True)  # opening a FIFO would wait for its writer
    with path.open("rb", buffering=0) as file:
        yield file, os.fstat(file.fileno()).st_size


def list_files(directory: AnyPath) -> list[tuple[AnyPath, float | None]]:
    """Return the files in a directory, if it is there, and when each was last changed (Unix time in s; None if unknown)."""
    if isinstance(directory, RemotePath):
        return [*directory.files()]
    files = [directory / entry.name for entry in _entries(directory) if not entry.is_dir(follow_symlinks=False)]
    return [(path, _modified(path)) for path in files if not path.is_dir()]  # through a link; False for one that leads nowhere


def list_directories(directory: AnyPath) -> list[AnyPath]:
    """Return the directories in a directory, if it is there, without links to some."""
    if isinstance(directory, RemotePath):
        return [*directory.directories()]
    return [directory / entry.name for entry in _entries(directory) if entry.is_dir(follow_symlinks=False)]


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """Return what is in a directory; nothing if it is not there. Another process may remove it, or some of it, meanwhile."""
    try:
        with os.scandir(directory) as entries:
            return [*entries]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def remove_directory(directory: AnyPath, files: Sequence[AnyPath]) -> None:
    """Remove a directory that has these files and nothing else."""
    if isinstance(directory, RemotePath):
        directory.remove_directory(files)
        return
    with failing(f"cannot remove {directory}"):
        for file in files:
            platform.patiently(Path(str(file)).unlink, missing_ok=True)
        with suppress(FileNotFoundError):  # another process has removed it
            platform.patiently(directory.rmdir)  # which fails if something else has come into it


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return None


def is_plain_name(name: object) -> TypeGuard[str]:
    """Return True if ``name`` is text that can name a file in a directory, and nothing outside of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or {*name} & {*platform.NOT_IN_NAMES, "\0"}:
        return False
    try:
        return len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def check_regular(path: object) -> None:
    """Raise CheckpointDamagedError for a local link, device, FIFO or directory; FileNotFoundError for a missing file."""
    if isinstance(path, Path):
        file_size(path)


def file_size(path: Path, *, follow: bool = False) -> int:
    """Return the size of a regular file in bytes; see ``check_regular``. With ``follow`` a link to one is allowed."""
    status = path.stat(follow_symlinks=follow)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise CheckpointDamagedError(f"{path} is {kind} and not a regular file")
    return status.st_size


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes."""
    if (size := file_size(path)) > most:
        raise CheckpointDamagedError(f"{path} has {size:,} bytes; the limit is {most:,}")
    return path.read_bytes()
