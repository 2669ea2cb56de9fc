"""The folder of a run: each has its own, ``runs/first``, then ``runs/first-2``, and so on, locked against a second training.

In another trainer's folder the files of an earlier run are moved to a subfolder. A lock ends with its process.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from trainbus.eventloop import platform
from trainbus.eventloop.bus import Hook
from trainbus.eventloop.checkpoint import SCORES, AnyPath, checkpoints_in, is_checkpoint
from trainbus.eventloop.checkpoint.shards import stranded
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.schema import LAST

_FILES: Final = (LAST, SCORES, "run.json", "record.jsonl", "scalars.jsonl", "scalars.csv", "tensorboard")
"""Files that hooks write into the work dir of a run, by default."""

LOCK: Final = ".trainbus.lock"
_HOLDER: Final = 200  # bytes to read of the holder's name
_LASTING: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_TRIES: Final = 100  # each fails only if a training ends at that moment

log = get_logger()

F = TypeVar("F", bound=AnyPath)


def files_of_run(folder: AnyPath, hooks: Iterable[Hook] = ()) -> Iterator[AnyPath]:
    """Yield the files of a run in ``folder``, and those that ``hooks`` would write for a run there."""
    named = (path for hook in hooks if isinstance(folder, Path) for path in hook.files_of_run(folder))
    for path in dict.fromkeys([*(folder / name for name in _FILES), *named]):
        if path.exists():
            yield path
    yield from checkpoints_in(folder)


def has_run(folder: AnyPath, hooks: Iterable[Hook] = ()) -> bool:
    """Return True if a folder has files of a run. One that only has other files has none."""
    keeps = isinstance(folder, Path) and bool(stranded(folder))  # of a rank that writes nothing else
    return keeps or any(True for _ in files_of_run(folder, hooks))


def move_aside(folder: Path, hooks: Iterable[Hook]) -> Path | None:
    """Move the files of an earlier run in ``folder`` to its subfolder ``earlier-1``, ``earlier-2`` …; return that."""
    found = [path for path in files_of_run(folder, hooks) if isinstance(path, Path) and path.is_relative_to(folder)]
    if bool(stranded(folder)):  # beside their checkpoints
        found = [path for path in found if path.name != LAST and not is_checkpoint(path)]
    if not found:
        return None
    aside = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    for path in dict.fromkeys(found):
        (aside / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        platform.patiently(path.rename, aside / path.relative_to(folder))
    return aside


def free_folder(wanted: F, hooks: Iterable[Hook] = ()) -> F:
    """Return ``wanted``, or the first of ``wanted-2``, ``wanted-3`` … that has no run, also not in other folders of ``hooks``.

    Raises:
        ConfigurationError: the folder cannot be read, or it has files and no name that a number can follow (``..``).
    """
    return numbered(wanted, free_number(wanted, hooks))


def free_number(wanted: AnyPath, hooks: Iterable[Hook] = ()) -> int:
    """Return the number of :func:`free_folder`; 1 for ``wanted`` itself."""
    folder, number = wanted, 0
    try:
        if wanted.name in ("", "..") and isinstance(wanted, Path) and any(wanted.iterdir()):
            raise ConfigurationError(f"{wanted} is not empty; give the run an empty folder, such as {wanted / 'run'}")
        for number in count(1):
            folder = numbered(wanted, number)
            if not has_run(folder, hooks):
                break  # making it tells what is wrong with a file of this name
    except OSError as error:
        name = str(folder) if len(str(folder)) <= 80 else f"{str(folder)[:80]}…"
        raise ConfigurationError(f"{name}: cannot be used: {error.strerror}") from None
    return number


def newest_run(wanted: Path) -> Path:
    """Return the run with the highest number among ``wanted`` and its numbered siblings; ``wanted`` if there is none.

    The number decides, because copied files have other times.
    """
    return numbered(wanted, newest_number(wanted))


def newest_number(wanted: Path) -> int:
    """Return the number of :func:`newest_run`; 1 for ``wanted`` itself, 0 if there is none."""
    second = numbered(wanted, 2)
    own = re.compile(rf"{re.escape(second.name.removesuffix('-2'))}-(\d+)")  # not the runs with a longer name
    found = [int(match[1]) for run in second.parent.glob("*") if (match := own.fullmatch(run.name)) and has_run(run)]
    return max(found, default=int(has_run(wanted)))


def numbered(wanted: F, number: int) -> F:
    """Return the folder with a number, ``wanted-3``; ``wanted`` itself below 2."""
    if number < 2:
        return wanted
    # Runs in the current folder have their successors in it, and not beside it.
    first: Any = wanted / "run" if wanted.absolute() == Path.cwd() else wanted
    return cast("F", first.with_name(f"{first.name}-{number}"))


class DirectoryLock:
    """Lock a directory, created if missing, by a lock on a file in it, until :meth:`release` or the end of this process.

    If the file system supports no locks, or fails at that moment, a warning is logged, and the training continues.

    Raises:
        ConfigurationError: the directory cannot be made or written, or another training holds it; the error names its process.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / LOCK
        self._descriptor: int | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._take()
        except BlockingIOError:
            holder, end = self._holder()
            raise ConfigurationError(
                f"{directory} is in use by {holder}, and two trainings would overwrite each other's files: give this run "
                f"another work_dir, or {end}"
            ) from None
        except OSError as error:
            if error.errno in _LASTING:
                raise ConfigurationError(
                    f"{directory} cannot be written ({error.strerror}): give another work_dir, or out_dir of the hook"
                ) from error
            log.warning(
                "this directory cannot be locked, so a second training in it would go unnoticed",
                id="directory-not-locked",
                directory=str(directory),
                error=str(error),
            )
        else:
            _held.add(self)

    def release(self) -> None:
        """Unlock the directory. Idempotent."""
        _held.discard(self)
        try:
            try:
                mine = self._descriptor is not None and self._is_file(self._descriptor)
                if mine and not platform.IN_USE_STAYS:
                    self._file.unlink()  # while locked: whichever process opened it meanwhile checks that it still exists
            finally:
                self.forget()
            if mine and platform.IN_USE_STAYS:
                with suppress(PermissionError):  # a process that opened it meanwhile locks it
                    self._file.unlink()
        except OSError as error:  # from close(), too
            log.warning(
                "a lock file cannot be removed; it no longer locks anything",
                id="lock-file-left",
                path=str(self._file),
                error=str(error),
            )

    def forget(self) -> None:
        """Close the file; in a forked child this leaves the lock to the parent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self) -> None:
        for _ in range(_TRIES):
            descriptor = platform.open_file(self._file, os.O_RDWR | os.O_CREAT)
            try:
                platform.lock(descriptor)
                if self._is_file(descriptor):  # else its former holder removed it meanwhile
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _this_process().encode())
                    self._descriptor = descriptor
                    return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        raise OSError(errno.ESTALE, "the lock file was replaced at each try", str(self._file))

    def _is_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.lstat())
        except FileNotFoundError:
            return False

    def _holder(self) -> tuple[str, str]:
        holder = ""
        with suppress(OSError), self._file.open("rb") as file:
            holder = file.read(_HOLDER).decode(errors="replace")
        if holder == _this_process():
            return f"another run of this process ({os.getpid()})", (
                "leave the `with` block of that run; if a notebook cell was interrupted inside it, call "
                "`run.__exit__(None, None, None)` on that run, or restart the kernel"
            )
        who = holder if holder.isprintable() and holder else "another process"
        return who, "wait until it ends (its lock ends with its process)"


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


_held: set[DirectoryLock] = set()


def _forget_in_child() -> None:
    while _held:
        _held.pop().forget()


# Else a DataLoader worker that outlives its parent would keep the lock.
platform.at_fork(in_child=_forget_in_child)
