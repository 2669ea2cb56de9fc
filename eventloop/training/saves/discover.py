"""Find the newest good checkpoint in directories, and read the progress in one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainbus.eventloop.checkpoint import (
    AnyPath,
    RemotePath,
    as_path,
    check_regular,
    is_plain_name,
    list_files,
    open_file,
    plain_tree,
    verify_shards,
)
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.schema import LAST, how_far, lacking, read_counts

if TYPE_CHECKING:
    from trainbus.eventloop.events import Progress

_MOST: Final = 1 << 16  # bytes to read of a last_checkpoint file

Read = Callable[[AnyPath], Any]
Found = tuple[AnyPath, Any]
"""The path of a checkpoint, and its tree."""

log = get_logger()


def peek(path: str | os.PathLike[str] | AnyPath) -> Progress:
    """Return the progress in a checkpoint, or in the newest readable one in a directory, without reading its tensors.

    Only the header is verified. ``stage`` is ``"val"`` if a run that resumes from the file begins with a validation.
    ``path`` may also be the URL of either.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CheckpointDamagedError: the header is damaged, or the headers of all checkpoints in the directory are.
        CheckpointError: the file is not a checkpoint of a run, the directory holds none, or the store does not answer.
    """
    file, state = read_checkpoint(as_path(path), plain_tree, "give a checkpoint, or a directory of checkpoints")
    if lacking(state) or not how_far(state):
        raise CheckpointError(f"{file} is not a checkpoint of a run, so it has no progress")
    from trainbus.eventloop.training.machine import Counters

    counters = Counters()
    counters.restore(read_counts(state))
    return counters.snapshot("val", 0) if counters.phase == "val" else counters.snapshot()


def read_checkpoint(path: AnyPath, read: Read, way_out: str, known: Iterable[AnyPath] = ()) -> Found:
    """``read`` a checkpoint, or the newest good one in a directory; an error ends with the ``way_out``."""
    if not path.is_dir():
        try:
            return path, read(path)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{path} does not exist; {way_out}") from error
    found = find_checkpoint(path, known=known, read=read)
    if found is None:
        raise CheckpointNotFoundError(f"{path} has no checkpoint of a run; {way_out}")
    return found


def load_verified(path: AnyPath) -> Any:
    """Load a checkpoint, and verify its sharded tensors if it has any."""
    from trainbus.eventloop.checkpoint import load

    state = load(path)
    verify_shards(state, path)
    return state


def find_checkpoint(*directories: AnyPath, known: Iterable[AnyPath] = (), read: Read = load_verified) -> Found | None:
    """Read the newest good checkpoint in some directories; return None if they have no checkpoint.

    The order is that of `newest_first`; ``last_checkpoint`` may name a file in any of ``directories`` and ``known``. A file
    that cannot be read (damaged, a link, a FIFO, a device) is logged, and the previous one is tried.

    Raises:
        CheckpointDamagedError: there are checkpoints, but none can be read.
        CheckpointError: a remote directory does not answer.
    """
    damage: list[str] = []
    for path in _newest_first(directories, known, damage):
        try:
            check_regular(path)
            state = read(path)
        except FileNotFoundError:
            log.warning("a checkpoint was removed; trying the previous one", id="checkpoint-removed", path=str(path))
        except (CheckpointDamagedError, OSError) as error:
            log.warning(
                "a checkpoint is damaged or cannot be read; trying the previous one",
                id="checkpoint-damaged",
                path=str(path),
                error=str(error),
            )
            damage.append(str(error))
        else:
            if not lacking(state):
                return path, state
            log.info("this file is not a checkpoint of a run (a published copy?); trying the previous one", path=str(path))
    if damage:
        raise CheckpointDamagedError(f"no good checkpoint in {', '.join(map(str, directories))}: {'; '.join(damage)}")
    return None


def newest_candidate(*directories: AnyPath, known: Iterable[AnyPath] = ()) -> AnyPath | None:
    """Return the newest checkpoint in some directories by its header, which alone is verified; None if there is none."""
    return next((path for path in _newest_first(directories, known, []) if _far(path)), None)


def _newest_first(directories: Iterable[AnyPath], known: Iterable[AnyPath], damage: list[str]) -> Iterator[AnyPath]:
    listed = {directory: dict(list_files(directory)) for directory in directories}
    pointers = [directory for directory, files in listed.items() if directory / LAST in files]
    named = [_pointed_to(directory, [*listed, *known], damage) for directory in pointers]
    files = {path: changed for files in listed.values() for path, changed in files.items() if is_candidate(path)}
    yield from newest_first(files, [path for path in named if path is not None], _far)


def is_candidate(path: AnyPath) -> bool:
    """Return True if the name of a file is that of a checkpoint."""
    return path.suffix == ".safetensors" and not path.name.startswith(".")


def newest_first(
    files: Mapping[AnyPath, float | None], named: Iterable[AnyPath], far: Callable[[AnyPath], tuple[int, ...] | None]
) -> Iterator[AnyPath]:
    """Yield checkpoints in the order in which a resume tries them, by their progress.

    ``last_checkpoint`` tells the present training from an earlier, longer one in the same directory. So of the files with more
    progress than the one that it names, only those not written before that one are newer: a process that was killed had no time
    to name them. Times alone decide nothing, because copied files have others.

    Args:
        files: the checkpoints, each with its Unix time of change in s (None if unknown).
        named: the files that pointers name; they may be missing, or outside of ``files``.
        far: returns the progress in a file, as a tuple to compare; None if it cannot be read.
    """

    @cache  # with 20,000 tensors a header takes 0.3 s
    def rank(path: AnyPath) -> tuple[bool, tuple[int, ...], bool, str]:
        # An unreadable file comes first: it is logged, and may be the newest.
        progress = far(path)
        return progress is None, progress or (), not path.name.startswith("best_"), path.name

    first = sorted(dict.fromkeys(named), key=rank, reverse=True)
    limit, since = next(((rank(path), files.get(path)) for path in first if rank(path)[1]), (None, None))
    if limit is not None and since is not None:
        later = {path: rank(path) for path, changed in files.items() if changed is None or changed >= since}
        ahead = [path for path, found in later.items() if found[:2] > limit[:2]]
        first = [*sorted(ahead, key=lambda path: later[path], reverse=True), *first]
    yield from first
    ranks = {path: rank(path) for path in files if path not in first}
    yield from sorted(ranks, key=lambda path: (limit is None or ranks[path] <= limit, ranks[path]), reverse=True)


def _far(path: AnyPath) -> tuple[int, ...] | None:
    try:
        check_regular(path)
        return how_far(plain_tree(path))
    except (CheckpointDamagedError, OSError):
        return None


# ------------------------------------------------------------------- last_checkpoint: a hint without a digest


def read_pointer(directory: AnyPath) -> str | None:
    """Return the text of ``last_checkpoint`` in ``directory``; None, with a warning, if it cannot be read."""
    pointer = directory / LAST
    try:
        check_regular(pointer)
        with open_file(pointer) as (file, _):
            return os.fsdecode(file.read(_MOST)).strip()
    except FileNotFoundError:
        return None
    except (OSError, CheckpointDamagedError) as error:
        log.warning(
            "last_checkpoint cannot be read; searching its directory",
            id="last-checkpoint-unreadable",
            path=str(pointer),
            error=str(error),
        )
        return None


def file_named(directory: AnyPath, text: str, known: Iterable[AnyPath]) -> AnyPath | None:
    """Return the path, existing or not, that the ``text`` of ``last_checkpoint`` in ``directory`` names.

    Return None if it is outside ``directory`` and ``known``; no file or store out there is accessed.
    """
    if is_plain_name(text):
        return directory / text
    for other in known:
        if isinstance(other, RemotePath):
            before, _, name = text.rpartition("/")
            found = before == str(other)
        else:
            before, name = os.path.split(os.path.normpath(os.path.join(str(directory), text)))  # noqa: PTH118
            found = isinstance(directory, Path) and "\0" not in text and os.path.realpath(before) == os.path.realpath(other)
        if found and is_plain_name(name):
            return other / name
    return None


def _pointed_to(directory: AnyPath, known: Iterable[AnyPath], damage: list[str]) -> AnyPath | None:
    """Return the path, existing or not, that ``last_checkpoint`` names, if the run may have written it."""
    text = read_pointer(directory)
    if text is None:
        return None
    named = file_named(directory, text, known)
    if named is not None and not named.is_dir():
        return named
    log.warning(
        "last_checkpoint does not name a file in a directory of this run; searching its directory",
        id="last-checkpoint-names-no-file",
        path=str(directory / LAST),
        names=text,
    )
    if named is None:
        damage.append(
            f"{directory / LAST} names {text[:200]!r}, which is outside the directories of this run; to resume from it, give "
            "its path or URL as resume="
        )
    return None
