"""Which run of a tracking tool belongs to a work dir, so that a resumed run goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hooks.writers.files import replace


def run_id(
    work_dir: Path | None, filename: str, make: Callable[[], str], exists: Callable[[str], bool] = lambda known: True
) -> str:
    """Return the id noted in a file of the work dir; the first time it is what ``make`` returns, and noted.

    Args:
        work_dir: None for an id that is noted nowhere.
        filename: within the work dir.
        make: returns a new id.
        exists: tells whether the tool still has the run of an id that was noted.
    """
    if work_dir is None:
        return make()
    path = work_dir / filename
    if path.is_file() and (known := path.read_text(encoding="utf-8").strip()) and exists(known):
        return known
    made = make()
    replace(path, f"{made}\n".encode())
    return made
