"""trainbus's log lines: through structlog as the application has configured it, else plain lines on stderr.

structlog's own default prints to stdout and, where rich is installed, draws tracebacks with all local variables: seconds
beside a training thread, and a screenful of tensors.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger


def get_logger() -> FilteringBoundLogger:
    """Return the logger named ``"trainbus"``; what is configured is looked up at each line."""
    return cast("FilteringBoundLogger", _Logger())


class _Logger:
    def __getattr__(self, name: str) -> Any:
        return getattr(structlog.get_logger("trainbus") if structlog.is_configured() else _plain(), name)


def _plain() -> Any:
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
