"""Lock the directories of a training against a second one. A lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger

NAME: Final = ".trainbus.lock"
_MOST: Final = 200  # bytes to read of the holder's name
_LASTING: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_TRIES: Final = 100  # each fails only if a training ends at that moment

log = get_logger()


class DirectoryLock:
    """Lock a directory, created if missing, by ``flock`` on a file in it, until :meth:`release` or the end of this process.

    If the file system supports no locks, or fails at that moment, a warning is logged, and the training continues.

    Raises:
        ConfigurationError: the directory cannot be made or written, or another training holds it; the error names its process.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / NAME
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
                if self._descriptor is not None and self._is_file(self._descriptor):
                    self._file.unlink()  # while locked: whichever process opened it meanwhile checks that it still exists
            finally:
                self.forget()
        except OSError as error:  # from close(), too
            log.warning("a lock file cannot be removed; it no longer locks anything", path=str(self._file), error=str(error))

    def forget(self) -> None:
        """Close the file; in a forked child this leaves the lock to the parent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _ in range(_TRIES):
            descriptor = os.open(self._file, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            holder = file.read(_MOST).decode(errors="replace")
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
os.register_at_fork(after_in_child=_forget_in_child)
