"""The plugin of pytest for other systems than Linux: leave out tests that ask for what a system lacks, and count them."""

import errno
import os
import re
import traceback
from typing import Final

import pytest

LACKS: Final = re.compile(
    r"module '(os|signal|time|sys)'.* has no attribute '\w+'|No module named '(fcntl|resource|termios|pwd|grp|tty|pty)'"
    r"|cannot find context for '(fork|forkserver)'|invalid signal value"
)
REASON: Final = "the test itself asks for what this system lacks"


def asks(error: BaseException | None) -> bool:
    """Return True if an error, or one that it was raised from, comes from a test's own line that this system cannot run."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return any(map(asks, error.exceptions))
        modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = [module for module in modules if module in ("tests", "trainbus")]
        refused = isinstance(error, OSError) and error.errno in (
            errno.EACCES,
            errno.EINVAL,
            errno.EPERM,
        )  # in use; no such name
        linked = "samefile(" in str(error) and not hasattr(os, "link")  # where a second name is a copy
        if own[-1:] != ["trainbus"] and (refused or linked or LACKS.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    report = yield
    if call.excinfo is not None and asks(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (__file__, 0, f"{REASON}: {call.excinfo.value}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None and asks(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (__file__, 0, f"{REASON}: {call.excinfo.value}")
    return report


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter):
    found = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error", "skipped")}
    left_out = sum(REASON in str(report.longrepr) for report in found["skipped"])
    told = ", ".join(f"{len(reports)} {outcome}" for outcome, reports in found.items())
    terminalreporter.write_line(f"{told}; of the skipped, {left_out} ask for what this system lacks")
