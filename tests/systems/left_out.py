"""The plugin of pytest for other systems than Linux: leave out tests that ask for what a system lacks, and count them."""

import errno
import os
import re
import traceback
from typing import Final

from ..leaving_out import leaving_out

LACKS: Final = re.compile(
    r"module '(os|signal|time|sys)'.* has no attribute '\w+'|No module named '(fcntl|resource|termios|pwd|grp|tty|pty)'"
    r"|cannot find context for '(fork|forkserver)'|invalid signal value"
)
REASON: Final = "the test itself asks for what this system lacks"


def asks(error: BaseException) -> bool:
    """Return True if an error comes from a test's own line that this system cannot run."""
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [module for module in modules if module in ("tests", "trainbus")]
    refused = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EINVAL, errno.EPERM)  # in use; no such name
    linked = "samefile(" in str(error) and not hasattr(os, "link")  # where a second name is a copy
    return own[-1:] != ["trainbus"] and bool(refused or linked or LACKS.search(str(error)))


pytest_runtest_makereport, pytest_make_collect_report = leaving_out(asks, REASON)


def pytest_terminal_summary(terminalreporter):
    found = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error", "skipped")}
    left_out = sum(REASON in str(report.longrepr) for report in found["skipped"])
    told = ", ".join(f"{len(reports)} {outcome}" for outcome, reports in found.items())
    terminalreporter.write_line(f"{told}; of the skipped, {left_out} ask for what this system lacks")
