"""Folders of runs: a free one, and one to resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eventloop.config.words import shortened
from eventloop.errors import ConfigurationError


def free(wanted: Path) -> Path:
    """Return ``wanted``, or the first of ``wanted-2``, ``wanted-3`` … that is empty or missing.

    Raises:
        ConfigurationError: it is not empty and has no name that could be numbered, or cannot be read.
    """
    candidate, number = wanted, 1
    try:
        while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
            if wanted.name in ("", ".."):
                own = f"a run needs a folder of its own, such as {wanted / 'run'}"
                raise ConfigurationError(f"{wanted} is not empty, and {own}")
            number += 1
            candidate = wanted.with_name(f"{wanted.name}-{number}")
    except OSError as error:
        raise ConfigurationError(f"{shortened(str(candidate))}: cannot be used: {error.strerror}") from None
    return candidate


def to_resume(folder: Path | None, default: Path) -> Path:
    """Return ``folder``, or the run of the highest number among ``default`` and its numbered siblings.

    Times of files are those of their copies, and an older run may have come further.

    Raises:
        ConfigurationError: no checkpoint was committed there.
    """
    own = re.compile(rf"{re.escape(default.name)}(?:-(\d+))?")  # not those of a configuration whose name begins alike
    siblings = ((own.fullmatch(run.name), run) for run in default.parent.glob("*"))
    numbered = sorted((int(match[1] or 1), run) for match, run in siblings if match is not None)
    runs = [folder] if folder is not None else [run for _, run in numbered]
    found = [run for run in runs if (run / "last_checkpoint").is_file()]
    if not found:
        missing = f"there is nothing to resume in {folder or default.parent}: no last_checkpoint"
        raise ConfigurationError(f"{missing}; leave --resume out")
    return found[-1]


@contextmanager
def resumable(work_dir: Path, arguments: str) -> Iterator[None]:
    """Make the folder of a run; add ``arguments``, which resume it, as a note to Ctrl-C.

    Raises:
        ConfigurationError: the folder cannot be made.
    """
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{work_dir}: cannot be made: {error.strerror}") from None
    try:
        yield
    except KeyboardInterrupt as interrupt:
        saved = (work_dir / "last_checkpoint").exists()
        interrupt.add_note(f"goes on from the last checkpoint with {arguments}" if saved else "before the first checkpoint")
        raise
