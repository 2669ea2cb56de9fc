"""Requests for a checkpoint, and how requests at one mount point merge."""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from eventloop.checkpoint import AnyPath, Busy, RemotePath, Staging
from eventloop.checks import check_value
from eventloop.errors import ConfigurationError

OnError = Literal["raise", "log"]

_CHOICES: Final = {
    option: (annotation, frozenset(get_args(annotation)))
    for option, annotation in (("busy", Busy), ("staging", Staging), ("on_error", OnError))
}


class SaveRequest(msgspec.Struct, frozen=True):
    """The path of a requested checkpoint, and the options to write it with."""

    path: AnyPath
    leave_out: frozenset[str] = frozenset()
    """Keys to leave out of the checkpoint."""
    on_error: OnError = "raise"
    staging: Staging = "block"
    busy: Busy = "wait"

    def check(self, *, sharded: bool) -> None:
        """Raise ConfigurationError for an unknown option, or one that does not work with a sharded model."""
        for option, (annotation, allowed) in _CHOICES.items():
            value = getattr(self, option)
            if type(value) is not str or value not in allowed:  # check_value takes 10 times as long, for its message
                check_value(option, value, annotation)
        if not sharded:
            return
        if self.busy == "replace":
            raise ConfigurationError(
                'busy="replace" does not work with a sharded model: one process may have begun to write its part of the save '
                'that another replaces; use busy="wait" or "skip"'
            )
        if self.staging != "block":
            raise ConfigurationError(f'staging={self.staging!r} does not work with a sharded model: use "block"')
        if isinstance(self.path, RemotePath):
            raise ConfigurationError(
                f"cannot save to {self.path}: a sharded model needs a directory that all processes share, not a URL"
            )


def merged(requests: list[SaveRequest]) -> SaveRequest:
    """Merge requests into one, with the first path and the safest options."""
    if len(requests) == 1:
        return requests[0]
    return SaveRequest(
        path=requests[0].path,
        leave_out=frozenset.intersection(*(request.leave_out for request in requests)),
        on_error="raise" if any(request.on_error == "raise" for request in requests) else "log",
        # One request may need its copy at once, or must not be skipped.
        staging="overlap" if all(request.staging == "overlap" for request in requests) else "block",
        busy=min((request.busy for request in requests), key=("wait", "replace", "skip").index),
    )
