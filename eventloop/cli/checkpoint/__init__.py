"""``trainbus checkpoint``: look into checkpoints, verify them, and exchange them with other programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from eventloop.cli.arguments import Subparsers, place, positive
from eventloop.cli.checkpoint import exchange, listing, show
from eventloop.cli.checkpoint.output import complain
from eventloop.errors import CheckpointDamagedError, CheckpointError

_Call = Callable[[argparse.Namespace], int]
_EPILOG = "Exit status: 0, 1 for a damaged file or one that could not be written, 2 for a mistake in the call."


def add_parser(commands: Subparsers) -> None:
    """Declare the commands."""
    parser = commands.add_parser("checkpoint", help="list, verify, show, export and import checkpoints", epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_ls(actions)
    _add_verify(actions)
    _add_show(actions)
    _add_export(actions)
    _add_import(actions)


def _add_ls(actions: Subparsers) -> None:
    text = "the checkpoints of a directory: how far each has come, which is the newest, which are one file"
    parser = _add(actions, "ls", text, listing.ls)
    parser.add_argument("directory", type=place, metavar="DIR", help="or its URL, such as s3://bucket/run")
    parser.add_argument("--verify", action="store_true", help="read every byte and check the digests, not the headers alone")


def _add_verify(actions: Subparsers) -> None:
    parser = _add(actions, "verify", "read every byte of checkpoints and check their digests", listing.verify_all)
    parser.add_argument("paths", type=place, nargs="+", metavar="FILE|DIR", help="a checkpoint, a directory, or a URL of one")


def _add_show(actions: Subparsers) -> None:
    text = "what a checkpoint holds: names, shapes, dtypes, numbers (reads no tensors, so verifies none)"
    parser = _add(actions, "show", text, show.show)
    parser.add_argument("file", type=place, metavar="FILE", help="or its URL")
    parser.add_argument("--key", metavar="PATH", help="only this part, such as state_dict.head or optimizer.optimizer.state.0")
    parser.add_argument("--depth", type=positive, metavar="N", help="levels to show (default: 2; all of them with --json)")
    parser.add_argument("--json", action="store_true", help="for programs; NaN and infinities are texts")


def _add_export(actions: Subparsers) -> None:
    text = "write a checkpoint, or its weights, for torch.load(weights_only=True) or as plain safetensors"
    parser = _add(actions, "export", text, exchange.export)
    parser.add_argument("file", type=place, metavar="FILE", help="a checkpoint, or its URL; it is verified")
    parser.add_argument("out", type=place, metavar="OUT", help="a .pth file, or with --weights a .safetensors; or a URL")
    parser.add_argument("--weights", action="store_true", help="only the state_dict, for inference: the averages, if there are")
    parser.add_argument("--raw", action="store_true", help="with --weights: as they were trained, without averaging")
    parser.add_argument("--strip", action="store_true", help="with --weights: leave module. and _orig_mod. out of the names")
    parser.add_argument("--model", metavar="NAME", help="with --weights: which model, where there are several")
    parser.add_argument("--force", action="store_true", help="replace OUT")


def _add_import(actions: Subparsers) -> None:
    text = "make a checkpoint of what torch.save has written, MMEngine's included; runs no code of the file"
    parser = _add(actions, "import", text, exchange.import_)
    parser.add_argument("file", type=Path, metavar="FILE", help="a .pth file (or .pt, .ckpt …)")
    parser.add_argument("out", type=place, metavar="OUT.safetensors", help="or a URL")
    parser.add_argument("--force", action="store_true", help="replace OUT")


def _add(actions: Subparsers, name: str, text: str, call: _Call) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EPILOG)
    parser.set_defaults(call=_with_status(call))
    return parser


def _with_status(call: _Call) -> _Call:
    """Give each kind of error its exit status."""

    def guarded(options: argparse.Namespace) -> int:
        try:
            return call(options)
        except CheckpointError as error:
            complain(options, str(error))
            return 1 if isinstance(error, CheckpointDamagedError) or isinstance(error.__cause__, OSError) else 2
        except OSError as error:
            complain(options, str(error))
            return 1

    return guarded
