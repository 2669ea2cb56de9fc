"""What hooks ask for when they want a checkpoint, and what several wishes come to."""

from __future__ import annotations

from typing import Literal

import msgspec

from eventloop.checkpoint import AnyPath, Busy, RemotePath, Staging
from eventloop.errors import ConfigurationError

OnError = Literal["raise", "log"]


class SaveRequest(msgspec.Struct, frozen=True):
    """One hook's wish: a file, and what should be in it."""

    path: AnyPath
    leave_out: frozenset[str] = frozenset()
    """Keys of the checkpoint that are not to be in it."""
    on_error: OnError = "raise"
    staging: Staging = "block"
    busy: Busy = "wait"


def check_together(request: SaveRequest) -> None:
    """Raise ConfigurationError if processes that share a sharded model cannot save like this."""
    if request.busy == "replace":
        raise ConfigurationError(
            'busy="replace": of a sharded model each process writes a part, and one may have begun what another would replace; '
            'take busy="wait" or "skip"'
        )
    if request.staging != "block":
        raise ConfigurationError(
            f'staging={request.staging!r}: torch.distributed.checkpoint copies a sharded model at once; leave it at "block"'
        )
    if isinstance(request.path, RemotePath):
        raise ConfigurationError(
            f"{request.path}: a sharded model is saved to a directory that all processes share, not to a URL"
        )


def merged(requests: list[SaveRequest]) -> SaveRequest:
    """Return one request with everything that somebody wants, under the first name."""
    return SaveRequest(
        path=requests[0].path,
        leave_out=frozenset.intersection(*(request.leave_out for request in requests)),
        on_error=_strictest(*(request.on_error for request in requests)),
        # The most careful one of each: what one of them must have at once, or must not miss, none of them misses.
        staging="overlap" if all(request.staging == "overlap" for request in requests) else "block",
        busy=min((request.busy for request in requests), key=("wait", "replace", "skip").index),
    )


def _strictest(*policies: OnError) -> OnError:
    return "raise" if "raise" in policies else "log"
