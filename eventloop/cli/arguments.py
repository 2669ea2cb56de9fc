"""What the commands share: the type of their parsers, and types of arguments."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from eventloop.checkpoint import Place, place_of
from eventloop.errors import ConfigurationError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def place(text: str) -> Place:
    """Return what a path or a URL names; a URL that nothing here can reach is a usage error."""
    try:
        return place_of(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    """Return ``text`` as a number of 1 or more; argparse makes a usage error of anything else."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def seed(text: str) -> int:
    """Return ``text`` as a seed that Python's, numpy's and torch's generators take; anything else is a usage error."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} is no seed: give a number from 0 to {2**63 - 1}")
    return value
