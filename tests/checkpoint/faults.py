"""Disks that fail: at the n-th operation, or when they are full."""

import errno
import os
from typing import Any

import pytest

OPERATIONS = ["open", "write", "fsync", "close", "replace", "link", "unlink"]


class Faults:
    """Counts the file operations, and makes the n-th one fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at = -1
        self.error: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        gather(monkeypatch)

    def _wrap(self, name: str, real: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 == self.fail_at:
                if name == "close":
                    real(*args, **kwargs)  # a descriptor is gone even when close() reports an error
                raise self.error
            return real(*args, **kwargs)

        return operation

    def arm(self, at: int) -> None:
        self.calls.clear()
        self.fail_at = at

    def count(self, action: Any) -> list[str]:
        """Return the operations of what succeeds."""
        self.arm(-1)
        action()
        return list(self.calls)


def gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send what ``os.writev`` writes through ``os.write``."""
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, b"".join(parts)))


def fill_up(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Let the disk be full after so many bytes, the last of which a short write takes."""
    real, left = os.write, [room]

    def write(descriptor: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    gather(monkeypatch)
