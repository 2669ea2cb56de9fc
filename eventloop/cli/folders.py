"""Folders of runs: one that is free, and one that can go on."""

from __future__ import annotations

from pathlib import Path

from eventloop.errors import ConfigurationError


def free(wanted: Path) -> Path:
    """Return ``wanted``, or the first of ``wanted-2``, ``wanted-3`` … that holds nothing yet."""
    candidate, number = wanted, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def to_resume(folder: Path | None, default: Path) -> Path:
    """Return ``folder``, or the newest run among ``default`` and its numbered siblings.

    Raises:
        ConfigurationError: no checkpoint was committed there.
    """
    runs = [folder] if folder is not None else list(default.parent.glob(f"{default.name}*"))
    found = [run for run in runs if (run / "last_checkpoint").is_file()]
    if not found:
        raise ConfigurationError(
            f"there is nothing to resume in {folder or default.parent}: no last_checkpoint; leave --resume out"
        )
    return max(found, key=lambda run: (run / "last_checkpoint").stat().st_mtime_ns)
