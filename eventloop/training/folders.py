"""Choose the folder of a run: each run has its own, ``runs/first``, then ``runs/first-2``, and so on."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Final

from eventloop.checkpoint import file_kind
from eventloop.errors import ConfigurationError
from eventloop.training.saves.discover import is_candidate
from eventloop.training.saves.write import LAST

_FILES: Final = (LAST, "run.json", "record.jsonl", "scalars.jsonl", "scalars.csv", "tensorboard")
"""Files that hooks write into the work dir of a run."""


def has_run(folder: Path) -> bool:
    """Return True if a folder has files of a run. One that only has other files has none."""
    if any((folder / name).exists() for name in _FILES):
        return True
    return any(is_candidate(path) and path.is_file() and file_kind(path) == "checkpoint" for path in folder.glob("*"))


def free_folder(wanted: Path) -> Path:
    """Return ``wanted``, or the first of ``wanted-2``, ``wanted-3`` … that has no run.

    Raises:
        ConfigurationError: the folder cannot be read, or it has files and no name that a number can follow (``..``).
    """
    folder = wanted
    try:
        if wanted.name in ("", "..") and any(wanted.iterdir()):
            raise ConfigurationError(f"{wanted} is not empty; give the run an empty folder, such as {wanted / 'run'}")
        for number in count(1):
            folder = _numbered(wanted, number)
            if not (folder.is_dir() and has_run(folder)):
                break  # making it tells what is wrong with a file of this name
    except OSError as error:
        name = str(folder) if len(str(folder)) <= 80 else f"{str(folder)[:80]}…"
        raise ConfigurationError(f"{name}: cannot be used: {error.strerror}") from None
    return folder


def newest_run(wanted: Path) -> Path:
    """Return the run with the highest number among ``wanted`` and its numbered siblings; ``wanted`` if there is none.

    The number decides, because copied files have other times.
    """
    second = _numbered(wanted, 2)
    own = re.compile(rf"{re.escape(second.name.removesuffix('-2'))}-(\d+)")  # not the runs with a longer name
    found = [(int(match[1]), run) for run in second.parent.glob("*") if (match := own.fullmatch(run.name)) and has_run(run)]
    return max(found, default=(1, wanted))[1]


def _numbered(wanted: Path, number: int) -> Path:
    if number == 1:
        return wanted
    # Runs in the current folder have their successors in it, and not beside it.
    first = wanted / "run" if wanted.absolute() == Path.cwd() else wanted
    return first.with_name(f"{first.name}-{number}")
