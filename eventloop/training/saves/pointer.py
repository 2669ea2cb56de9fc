"""``last_checkpoint``: what it names, as far as that is a file of the run. It is a hint: no digest guards its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from eventloop.checkpoint import AnyPath, RemotePath, check_regular, is_plain_name, store_of
from eventloop.errors import CheckpointDamagedError
from eventloop.log import get_logger
from eventloop.training.saves.write import LAST

_MOST: Final = 1 << 16  # bytes

log = get_logger()


def read_pointer(directory: AnyPath) -> str | None:
    """Return what ``last_checkpoint`` in ``directory`` says; None, with a warning, where that cannot be read.

    Raises:
        CheckpointError: a remote directory does not answer.
    """
    pointer = directory / LAST
    try:
        check_regular(pointer)
        with store_of(pointer).opened(pointer) as (file, _):
            return os.fsdecode(file.read(_MOST)).strip()
    except FileNotFoundError:
        return None
    except (OSError, CheckpointDamagedError) as error:
        log.warning("last_checkpoint cannot be read; looking for checkpoints beside it", path=str(pointer), error=str(error))
        return None


def file_named(directory: AnyPath, way: str, known: Iterable[AnyPath]) -> AnyPath | None:
    """Return the file, there or not, that ``last_checkpoint`` in ``directory`` names by ``way``; None if it is elsewhere.

    Args:
        directory: where ``last_checkpoint`` is. A plain name is a file of it.
        way: what ``last_checkpoint`` says.
        known: the other directories that the run saves to; what is in none of them is not touched, nor is a store asked for it.
    """
    if is_plain_name(way):
        return directory / way
    for place in known:
        if isinstance(place, RemotePath):
            before, _, name = way.rpartition("/")
            found = before == str(place)
        else:
            before, name = os.path.split(os.path.normpath(os.path.join(str(directory), way)))  # noqa: PTH118
            found = isinstance(directory, Path) and "\0" not in way and os.path.realpath(before) == os.path.realpath(place)
        if found and is_plain_name(name):
            return place / name
    return None
