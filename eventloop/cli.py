"""The command ``trainbus``. The one module of ``eventloop`` that knows ``hooks``, and only once a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eventloop.errors import TrainbusError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, 2 for a mistake in the call, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return _demo(options)
    except TrainbusError as error:
        Console(stderr=True).print(f"[bold red]trainbus {options.command}:[/] {error}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainbus", description="An async event-bus runtime for PyTorch training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a small network on real handwritten digits, with every hook at work")
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="where files go (default: a new folder runs/digits, runs/digits-2 …)"
    )
    demo.add_argument("--epochs", type=_positive, default=30, metavar="N", help="epochs in all (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, shuffling and split (default: %(default)s)")
    demo.add_argument("--resume", action="store_true", help="go on from the last checkpoint in DIR (default: the newest run)")
    return parser


def _demo(options: argparse.Namespace) -> int:
    from hooks.demo import run_demo

    return run_demo(out=options.out, epochs=options.epochs, seed=options.seed, resume=options.resume)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
