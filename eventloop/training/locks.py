"""Locks on the directories of a training, so that no second one writes the same files. A lock dies with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from eventloop.errors import ConfigurationError
from eventloop.log import get_logger

NAME: Final = ".trainbus.lock"
_MOST: Final = 200  # bytes that name the holder
_TRIES: Final = 100  # of which each takes a training that ends just then

log = get_logger()


class DirectoryLock:
    """Holds a directory for one training until :meth:`release` or the end of this process, by ``flock`` on a file in it.

    Where the file system has no such locks (some network file systems), or the file cannot be written, a warning is logged and
    the training goes on.

    Args:
        directory: made if it is not there.

    Raises:
        ConfigurationError: a training has it; names the process.
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
                f"{directory} is in use: {holder} trains there, and two trainings would overwrite each other's files. "
                f"Give this run another work_dir, or {end}"
            ) from None
        except OSError as error:
            log.warning(
                "this directory cannot be locked; a second training in it would not be noticed",
                directory=str(directory),
                error=str(error),
            )
        else:
            _held.add(self)

    def release(self) -> None:
        """Let others have the directory. Idempotent."""
        _held.discard(self)
        try:
            try:
                if self._descriptor is not None and self._is_file(self._descriptor):
                    self._file.unlink()  # while locked: who opened the file meanwhile checks that it is still there
            finally:
                self.forget()
        except OSError as error:  # of closing the file, too
            log.warning("the file of a lock cannot be removed; it locks nothing", path=str(self._file), error=str(error))

    def forget(self) -> None:
        """Close the file; in a forked child, where the parent goes on holding it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _ in range(_TRIES):
            descriptor = os.open(self._file, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_file(descriptor):  # else the training that had it has removed it meanwhile
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _this_process().encode())
                    self._descriptor = descriptor
                    return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        raise OSError(errno.ESTALE, "the file of the lock is another one each time", str(self._file))

    def _is_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.lstat())
        except FileNotFoundError:
            return False

    def _holder(self) -> tuple[str, str]:
        """Return the holder of the lock, and the way to end it."""
        try:
            with self._file.open("rb") as file:
                told = file.read(_MOST).decode(errors="replace")
        except OSError:
            told = ""
        if told == _this_process():
            return f"another run of this process ({os.getpid()})", (
                "end that one: leave its `with` block; if a notebook cell was cut off inside it, call "
                "`run.__exit__(None, None, None)` on that run, or restart the kernel"
            )
        who = told if told.isprintable() and told else "another process"
        return who, "wait for that one (its lock ends with its process)"


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


_held: set[DirectoryLock] = set()


def _forget_in_child() -> None:
    while _held:
        _held.pop().forget()


# A worker of a loader, say, that outlives its parent would hold the lock for it.
os.register_at_fork(after_in_child=_forget_in_child)
