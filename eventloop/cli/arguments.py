"""What the commands share: the type of their parsers, and types of arguments."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from eventloop.checkpoint import AnyPath, as_path
from eventloop.config.words import shortened
from eventloop.errors import ConfigurationError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def place(text: str) -> AnyPath:
    """Return what a path or a URL names; a URL that nothing here can reach is a usage error."""
    try:
        return as_path(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    """Return ``text`` as a number of 1 or more; anything else is a usage error."""
    return _whole(text, 1, "a whole number from 1 on")


def seed(text: str) -> int:
    """Return ``text`` as a seed that Python's, numpy's and torch's generators take; anything else is a usage error."""
    return _whole(text, 0, f"a whole number from 0 to {2**63 - 1}")


def _whole(text: str, least: int, expected: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {shortened(text)!r}")
    return value
