"""``RunStatus``: the states that a run can be in."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class RunStatus(StrEnum):
    """The states of a run, as the record, the report, the dashboard, the metrics and ``trainbus runs`` name them."""

    RUNNING = "running"
    PAUSING = "pausing"
    """``run.pause()`` was called; the pause has not begun."""
    PAUSED = "paused"
    STOPPING = "stopping"
    """``run.stop()`` was called; the run has not ended."""
    FINISHED = "finished"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    """Ended by Ctrl-C."""
    FAILED = "failed"
    KILLED = "killed"
    """Its process has ended without recording how."""
    UNKNOWN = "unknown"
    """Not ended, but its process is on another machine, or not recorded."""


ENDED: Final = (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.INTERRUPTED, RunStatus.FAILED)
"""The states in which a run ends by itself."""


def after_error(error: BaseException) -> RunStatus:
    """Return the state of a run that ``error`` has ended; ``sys.exit()`` with no status or 0 counts as stopped, not failed."""
    if isinstance(error, KeyboardInterrupt):
        return RunStatus.INTERRUPTED
    return RunStatus.STOPPED if isinstance(error, SystemExit) and not error.code else RunStatus.FAILED
