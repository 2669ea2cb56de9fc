"""Checks of what a file says, before anything is opened or allocated because of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from eventloop.errors import CheckpointDamagedError

_LONGEST_NAME: Final = 255


def is_plain_name(name: object) -> bool:
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


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        CheckpointDamagedError: it is missing, or a link, a device, a FIFO or a directory.
    """
    try:
        status = path.lstat()
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamagedError(f"{path} is {kind_of(status.st_mode)} and no regular file")
    return status.st_size


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        CheckpointDamagedError: it is larger, or see `file_size`.
    """
    if (size := file_size(path)) > most:
        raise CheckpointDamagedError(f"{path} has {size:,} bytes; {most:,} are the most that it can have")
    return path.read_bytes()


def kind_of(mode: int) -> str:
    """Return what a file is, in words, by its ``st_mode``."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a regular file" if stat.S_ISREG(mode) else "a device")
