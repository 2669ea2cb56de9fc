"""Choose the folder of a run: each run has its own, ``runs/first``, then ``runs/first-2``, and so on.

In another trainer's folder the files of an earlier run are moved to a subfolder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from trainbus.eventloop.bus import Hook
from trainbus.eventloop.checkpoint import SCORES, AnyPath, checkpoints_in, is_checkpoint
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.training.schema import KEPT, LAST

_FILES: Final = (LAST, KEPT, SCORES, "run.json", "record.jsonl", "scalars.jsonl", "scalars.csv", "tensorboard")
"""Files that hooks write into the work dir of a run, by default."""

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
    keeps = isinstance(folder, Path) and any(folder.glob(f"*.shards/{KEPT}"))  # of a rank that writes nothing else
    return keeps or any(True for _ in files_of_run(folder, hooks))


def move_aside(folder: Path, hooks: Iterable[Hook]) -> Path | None:
    """Move the files of an earlier run in ``folder`` to its subfolder ``earlier-1``, ``earlier-2`` …; return that."""
    found = [path for path in files_of_run(folder, hooks) if isinstance(path, Path) and path.is_relative_to(folder)]
    if any(folder.glob("*.shards")):  # beside their checkpoints
        found = [path for path in found if path.name != LAST and not is_checkpoint(path)]
    if not found:
        return None
    aside = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    for path in dict.fromkeys(found):
        (aside / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        path.rename(aside / path.relative_to(folder))
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
