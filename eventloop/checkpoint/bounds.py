"""Checks of what a file says, before anything is opened or allocated because of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeGuard

from eventloop.errors import CheckpointDamagedError

MAX_TREE_BYTES: Final = 1 << 32
"""Bytes of everything in a checkpoint except its tensors. MessagePack cannot hold more in one piece."""

_LONGEST_NAME: Final = 255
_KINDS: Final = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def is_plain_name(name: object) -> TypeGuard[str]:
    """Return True if ``name`` is text that can name a file in a directory, and nothing outside of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def elements(shape: Sequence[int], most: int) -> int:
    """Return the number of elements of a shape, or a number above ``most`` where there are more.

    It never multiplies numbers that are larger than that: 100,000 dimensions of 9 would take seconds.
    """
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > most:
            return most + 1
    return count


def check_memory(size: int) -> None:
    """Refuse to read what this machine, or this container, cannot hold.

    Raises:
        CheckpointDamagedError: there is less memory than ``size`` bytes.
    """
    if size > (memory := _memory()):
        raise CheckpointDamagedError(f"it takes {size:,} bytes of memory, and there are {memory:,}")


def _memory() -> int:
    """Return the memory that there is, used or not, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of a container
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # there is none, or "max"
            continue
    return min(limits)


def check_regular(path: object) -> None:
    """Refuse what would hang, or lead elsewhere, when it is opened. Stores have nothing of the kind.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: it is a link, a device, a FIFO or a directory.
    """
    if isinstance(path, Path):
        file_size(path)


def file_size(path: Path, *, follow: bool = False) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        OSError: it cannot be looked at.
        CheckpointDamagedError: it is not a regular file; see `check_regular`. With ``follow`` a link to one is allowed.
    """
    status = path.stat(follow_symlinks=follow)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise CheckpointDamagedError(f"{path} is {kind} and not a regular file")
    return status.st_size


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        CheckpointDamagedError: it is larger, or see `file_size`.
    """
    if (size := file_size(path)) > most:
        raise CheckpointDamagedError(f"{path} has {size:,} bytes; {most:,} are the most that it can have")
    return path.read_bytes()
