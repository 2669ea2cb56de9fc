"""``trainbus checkpoint show``."""

from __future__ import annotations

import math
from json import dumps
from typing import Final

from rich.filesize import decimal

from trainbus.cli.common import FileOrURL, Positive, check_checkpoint, say, to_terminal
from trainbus.eventloop.checkpoint import inspect, scores_of
from trainbus.eventloop.terminal import printable

_MANY: Final = 20  # entries per level without --depth and --key


def show(file: FileOrURL, /, *, key: str | None = None, depth: Positive | None = None, json: bool = False) -> None:
    """Show the contents of a checkpoint: names, shapes, dtypes, numbers. Does not read tensors, so nothing is verified.

    The scores are the metrics of the validation of this file's weights, from scores.json beside it.

    Args:
        file: a checkpoint, or its URL.
        key: show only this part, such as state_dict.head or optimizer.optimizer.state.0.
        depth: levels to show; by default 2, with --json all.
        json: print JSON, with NaN and infinities as strings.
    """
    from trainbus.cli.checkpoint.outline import DEPTH, Outline, find, short, text_of
    from trainbus.eventloop.checkpoint import outline

    check_checkpoint(file)
    about, tree, scores = inspect(file), outline(file), scores_of(file)
    path, part = ("", tree) if key is None else find(tree, key)
    outlined = Outline(tree, most=_MANY if depth is None and key is None else None)
    if json:
        facts = {"file": str(about.path), "bytes": about.bytes, "version": about.version, "digest": about.digest}
        facts |= {"scores": scores, "key": path}
        tree = outlined.as_json(path, part, depth or math.inf)
        to_terminal().out(dumps({**facts, "tree": tree}, indent=2), highlight=False)
        return
    size = f"  {decimal(about.bytes)}, {len(about.tensors):,} tensors, {about.digest} "
    say((printable(str(about.path)), "bold"), size, ("(not verified)", "dim"))
    if scores and key is None:
        say(("scores", "cyan"), ": ", ", ".join(f"{printable(name)} {short(text_of(value))}" for name, value in scores.items()))
    for line in outlined.lines(path, part, depth or DEPTH):
        say(*line)
