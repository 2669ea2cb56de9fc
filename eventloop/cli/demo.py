"""``trainbus demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from eventloop.cli.arguments import Subparsers, positive, seed
from eventloop.cli.folders import free, resumable, to_resume

DEFAULT = Path("runs/digits")


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = commands.add_parser("demo", help="train a small network on real handwritten digits, with every hook at work")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where files go (default: a new folder runs/digits, runs/digits-2 …)"
    )
    parser.add_argument("--epochs", type=positive, default=30, metavar="N", help="epochs in all (default: %(default)s)")
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of weights, shuffling and split (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in DIR (default: the newest run)")
    parser.set_defaults(call=_demo)


def _demo(options: argparse.Namespace) -> int:
    from hooks.demo import run_demo

    work_dir = to_resume(options.out, DEFAULT) if options.resume else free(options.out or DEFAULT)
    with resumable(work_dir, f"--resume --out {work_dir}"):
        return run_demo(work_dir, epochs=options.epochs, seed=options.seed, resume=options.resume)
