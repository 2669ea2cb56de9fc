"""``CheckpointFiles``: the files of a run's checkpoints that are there, as one message that is replaced."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import msgspec

from trainbus.observe.dashboard.message_log import MessageLog
from trainbus.observe.record import Checkpoint

_MOST: Final = 50  # newest files


class _File(msgspec.Struct):
    saved: Checkpoint
    paths: list[str]


class CheckpointFiles:
    """Post the list of checkpoint files to a page. Every method may be called from any thread, and waits for the disk.

    A file is gone when its folder is there and the file is not. What cannot be looked up here stays in the list: a file in a
    store, or in a folder of another machine.
    """

    def __init__(self, messages: MessageLog) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._written, self._stall = 0, 0.0
        self._posted = self._facts()

    def add(self, saved: Checkpoint) -> None:
        """Add a file, or further names of the file of the same iteration, and post the list."""
        with self._lock:
            for file in self._files:  # a file that is written again is the new one
                file.paths = [path for path in file.paths if path not in saved.names]
            last = self._files[-1] if self._files else None
            if last is not None and not saved.bytes and last.saved.iter == saved.iter:
                last.paths += saved.names
            else:
                self._files.append(_File(saved, [*saved.names]))
            self._written += saved.bytes > 0
            self._stall += saved.stall
        self.refresh()

    def refresh(self) -> None:
        """Post the list without the files that are gone; nothing if it is as before."""
        with self._lock:
            for file in self._files:
                file.paths = [path for path in file.paths if not _is_gone(path)]
            self._files = [file for file in self._files if file.paths][-_MOST:]
            facts = self._facts()
            if facts != self._posted:
                self._posted = facts
                self._messages.post("files", facts, replace=True)

    def _facts(self) -> dict[str, Any]:
        files = [
            {
                "names": [last_part(path) for path in file.paths],
                "iter": file.saved.iter,
                "bytes": file.saved.bytes,
                "stall": file.saved.stall,
                "seconds": file.saved.seconds,
            }
            for file in self._files
        ]
        return {"files": files, "written": self._written, "stall": self._stall}


def last_part(path: str) -> str:
    """Return the name of a file in a folder or a store."""
    return path.rstrip("/").rpartition("/")[2]


def _is_gone(path: str) -> bool:
    if "://" in path:
        return False
    try:
        Path(path).stat()
    except FileNotFoundError:
        return Path(path).parent.is_dir()
    except (OSError, ValueError):
        return False
    return False
