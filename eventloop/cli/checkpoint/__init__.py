"""``trainbus checkpoint``: look into checkpoints, verify them, and exchange them with other programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from cyclopts import App

from eventloop.cli.checkpoint import exchange, listing, show
from eventloop.errors import CheckpointError

P = ParamSpec("P")

app = App(
    name="checkpoint",
    help="List, verify, show, export and import checkpoints.",
    help_epilogue="Exit status: 0, 1 for a damaged file or one that could not be written, 2 for a mistake in the call.",
)


def _reporting(command: Callable[P, int]) -> Callable[P, int]:
    """Let a file that cannot be read be an error that the command reports, instead of a traceback."""

    @functools.wraps(command)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except OSError as error:
            raise CheckpointError(str(error)) from error

    return reporting


app.command(_reporting(listing.ls))
app.command(_reporting(listing.verify_all), name="verify")
app.command(_reporting(show.show))
app.command(_reporting(exchange.export))
app.command(_reporting(exchange.import_), name="import")
