"""Log through structlog if the application has configured it, else print plain lines on stderr.

structlog's own default prints to stdout and, where rich is installed, draws tracebacks with all local variables: seconds
beside a training thread, and a screenful of tensors. Where several processes train together, all but the first log only
warnings and errors, with their rank.

Each warning and error has an ``id`` that stays the same when its text is improved, by which to filter and to test. Lines on a
terminal leave it out.

structlog is imported with the first line: it takes longer than a command that logs nothing.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, cast

from trainbus.eventloop.terminal import printable
from trainbus.eventloop.user_errors import contextmanager, described
from trainbus.eventloop.world import this_rank

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def get_logger() -> FilteringBoundLogger:
    """Return the logger named ``"trainbus"``, which looks up structlog's configuration at each line."""
    return cast("FilteringBoundLogger", _Logger())


_collections: list[list[str]] = []


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the texts of warnings and errors in a list, on all threads, and log nothing."""
    lines: list[str] = []
    _collections.append(lines)
    try:
        yield lines
    finally:
        _collections.remove(lines)


def _collect(level: str, text: str, **facts: Any) -> None:
    if level in ("warning", "error", "exception", "critical"):
        named = ", ".join(f"{name}={value}" for name, value in facts.items() if name not in ("exc_info", "id"))
        _collections[-1].append(f"{text} ({named})" if named else text)


class _Logger:
    def __getattr__(self, name: str) -> Any:
        if _collections and name in ("debug", "info", "warning", "error", "exception", "critical"):
            return partial(_collect, name)
        import structlog

        return getattr(structlog.get_logger("trainbus") if structlog.is_configured() else _plain(), name)


def _plain() -> Any:
    import structlog

    rank = this_rank()
    colors = sys.stderr is not None and sys.stderr.isatty()
    return structlog.wrap_logger(
        _Stderr(),
        processors=[
            *([lambda _, __, event: {**event, "rank": rank}] if rank else []),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            lambda _, __, event: {name: _escaped(value) for name, value in event.items() if name != "id"},
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING if rank else logging.INFO),
    )


def _escaped(value: Any) -> Any:
    return printable(value, keep="\n") if isinstance(value, str) else value


def _traceback(file: TextIO, exc_info: Any) -> None:
    from structlog.dev import plain_traceback

    whole = io.StringIO()
    try:
        plain_traceback(whole, exc_info)
    except Exception as second:  # noqa: BLE001 - a property or __str__ of the user's exception raises
        whole.write(f"{described(exc_info[1])} (its traceback cannot be printed: {described(second)})")
    file.write(printable(whole.getvalue(), keep="\n"))


class _Stderr:
    """Write to ``sys.stderr``, or if that fails to the process's own, because a failed log line must not end a training.

    A live display of rich (a progress bar) replaces ``sys.stderr`` while it is shown, and its terminal can disappear. Each
    line is one write: flushed in its middle, rich's replacement prints colours as text, and other writers' lines to the same
    pipe mix in. (structlog's own PrintLogger writes twice.)
    """

    def error(self, line: str) -> None:
        for file in (sys.stderr, sys.__stderr__):
            try:
                if file is not None:
                    file.write(f"{line}\n")
                    file.flush()
                    return
            except Exception:  # noqa: BLE001, S112 - nothing is left to log it to
                continue

    debug = info = warning = critical = error
