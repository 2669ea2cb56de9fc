"""The command ``trainbus``, a module for each group of commands.

Nothing else in ``eventloop`` knows ``hooks``, and these modules import it only once a command needs it. A module declares
its commands in ``add_parser(commands)`` and names the function to call by ``set_defaults(call=...)``: it takes the parsed
options and returns the exit status.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from torch.distributed import is_torchelastic_launched

import trainbus
from eventloop.cli import catalogue, checkpoint, demo, run
from eventloop.errors import TrainbusError

GROUPS = (demo, run, catalogue, checkpoint)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, 2 for a mistake in the call, 130 after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow or a rule that the terminal's encoding lacks
    options = _parsed(arguments)
    try:
        return int(options.call(options))
    except TrainbusError as error:
        _tell(options.command, str(error), error)
        return 2
    except KeyboardInterrupt as interrupt:
        _tell(options.command, "interrupted", interrupt)
        return 130


def _tell(command: str, what: str, error: BaseException) -> None:
    console = Console(stderr=True)
    who = f" (rank {os.environ['RANK']})" if is_torchelastic_launched() else ""  # so that it is clear whose of several lines
    lines = "\n".join([what, *getattr(error, "__notes__", ())])
    # One write: the lines of several ranks come from as many processes.
    console.print(Text.assemble((f"trainbus {command}{who}:", "bold red"), f" {lines}"), soft_wrap=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes all words of a list from one place; those behind an option are left over.
    if rest and (not hasattr(options, "changes") or any(word.startswith("-") for word in rest)):
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.changes = [*options.changes, *rest]
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command with all of its commands."""
    parser = argparse.ArgumentParser(prog="trainbus", description="An async event-bus runtime for PyTorch training.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {trainbus.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_parser(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser
