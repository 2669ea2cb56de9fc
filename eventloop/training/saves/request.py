"""Requests for a checkpoint, and the one request that several of the same moment amount to."""

from __future__ import annotations

from typing import Literal

import msgspec

from eventloop.checkpoint import AnyPath, Busy, RemotePath, Staging, check_busy, check_staging
from eventloop.errors import ConfigurationError

OnError = Literal["raise", "log"]


class SaveRequest(msgspec.Struct, frozen=True):
    """A checkpoint file that a hook wants, and how to write it."""

    path: AnyPath
    leave_out: frozenset[str] = frozenset()
    """Keys that the checkpoint does not get."""
    on_error: OnError = "raise"
    staging: Staging = "block"
    busy: Busy = "wait"

    def check(self, *, sharded: bool) -> None:
        """Raise ConfigurationError for an unknown option, or for one that a sharded model cannot be saved with."""
        check_busy(self.busy)
        check_staging(self.staging)
        if not sharded:
            return
        if self.busy == "replace":
            raise ConfigurationError(
                'busy="replace": each process writes its part of a sharded model, and may have begun with what another process '
                'would replace; use busy="wait" or "skip"'
            )
        if self.staging != "block":
            raise ConfigurationError(
                f'staging={self.staging!r}: torch.distributed.checkpoint copies a sharded model at once; leave it at "block"'
            )
        if isinstance(self.path, RemotePath):
            raise ConfigurationError(
                f"{self.path}: a sharded model is saved to a directory that all processes share, not to a URL"
            )


def merged(requests: list[SaveRequest]) -> SaveRequest:
    """Return one request, under the first name, that satisfies all ``requests``."""
    return SaveRequest(
        path=requests[0].path,
        leave_out=frozenset.intersection(*(request.leave_out for request in requests)),
        on_error="raise" if any(request.on_error == "raise" for request in requests) else "log",
        # The most careful of each: one request may need its copy at once, or must not miss its save.
        staging="overlap" if all(request.staging == "overlap" for request in requests) else "block",
        busy=min((request.busy for request in requests), key=("wait", "replace", "skip").index),
    )
