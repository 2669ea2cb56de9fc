"""``trainbus checkpoint export`` and ``import``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from eventloop.checkpoint import (
    AnyPath,
    RemotePath,
    convert_foreign,
    export_tree,
    export_weights,
    is_weights,
    load_pth,
    outline,
    save,
)
from eventloop.cli.checkpoint.output import check_file, check_kind, say, status_of, to_terminal
from eventloop.errors import CheckpointError
from eventloop.training.saves.discover import is_resumable


def export(options: argparse.Namespace) -> int:
    """Write a checkpoint, or its weights, in another form."""
    for option in ("raw", "strip", "model"):
        if getattr(options, option) and not options.weights:
            raise CheckpointError(f"--{option} goes with --weights")
    if options.out.suffix == ".safetensors" and not options.weights:
        raise CheckpointError(f"{options.out}: a checkpoint is safetensors already; with --weights, only its weights")
    check_file(options.file)
    check_kind(options.file)
    _check_free(options.file, options.out, force=options.force)
    if options.weights:
        key = _raw_key(options.file) if options.raw else "state_dict"
        export_weights(options.file, options.out, key=key, strip=options.strip, model=options.model)
    else:
        export_tree(options.file, options.out)
    what = "weights" if options.weights else "the whole checkpoint"
    how = "safetensors" if options.out.suffix == ".safetensors" else "torch.load(..., weights_only=True)"
    say(to_terminal(), ("exported ", "bold"), f"{options.out}  {decimal(status_of(options.out).bytes)}, {what}, for {how}")
    return 0


def import_(options: argparse.Namespace) -> int:
    """Make a checkpoint of a file of ``torch.save``, and say what it is good for."""
    if options.out.suffix != ".safetensors":
        raise CheckpointError(f"{options.out}: the name of a checkpoint ends in .safetensors")
    check_file(options.file)
    _check_free(options.file, options.out, force=options.force)
    import hooks  # noqa: F401 - registers the formats of other systems

    tree = load_pth(options.file)
    state, notes = _converted(tree)
    written = save(state, options.out)
    console = to_terminal()
    say(console, ("imported  ", "bold"), f"{options.out}  {decimal(written.bytes)}, {written.digest}")
    for name, text in notes.items():
        _note(console, name, text)
    return 0


def _raw_key(file: AnyPath) -> str:
    """Return the key of the trained weights in a checkpoint that has averages, too.

    Raises:
        CheckpointError: it has none.
    """
    from hooks.ema import RAW_WEIGHTS

    tree = outline(file)
    if isinstance(tree, Mapping) and RAW_WEIGHTS not in tree and "state_dict" in tree:
        raise CheckpointError("there are no averages in this checkpoint: its state_dict has the trained weights already")
    return RAW_WEIGHTS


def _converted(tree: Any) -> tuple[Any, dict[str, str]]:
    """Return what to save of ``tree``, and what to say about it."""
    if (converted := convert_foreign(tree)) is not None:
        return converted
    if is_weights(tree):
        return {"state_dict": dict(tree)}, {"from": "a state_dict, now under that key", "resumes": "nothing but the weights"}
    if is_resumable(tree):
        return tree, {"from": "an export of trainbus", "resumes": "the run"}
    if not isinstance(tree, Mapping):
        return tree, {"from": f"a {type(tree).__name__}, as it is", "resumes": "nothing; eventloop.checkpoint.load reads it"}
    keys = ", ".join(map(str, list(tree)[:8])) + (" …" if len(tree) > 8 else "")
    if "state_dict" in tree:
        resumes = "nothing but the weights: load_weights(model, load(OUT)['state_dict'])"
    else:
        resumes = "nothing; eventloop.checkpoint.load reads it"
    return tree, {"from": f"a dict, as it is: {keys}", "resumes": resumes}


def _note(console: Console, name: str, text: str) -> None:
    say(console, (f"{name:10}", "dim"), text)


def _check_free(file: AnyPath, out: AnyPath, *, force: bool) -> None:
    """Refuse to overwrite.

    Raises:
        CheckpointError: ``out`` is there without ``force``, or is the file that is read, or its directory is missing.
    """
    if not isinstance(out, RemotePath) and not out.parent.is_dir():  # in a store a directory is there with its first file
        raise CheckpointError(f"{out.parent}: no such directory")
    if out.is_dir():
        raise CheckpointError(f"{out} is a directory")
    there = out.exists()
    if there and file.exists() and status_of(out).identity == status_of(file).identity:
        raise CheckpointError(f"{out} is the file that is read; give another name")
    if there and not force:
        raise CheckpointError(f"{out} is there already; --force replaces it")
