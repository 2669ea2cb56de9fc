"""Which checkpoint files stay: nothing goes before its successor is durable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec


class Entry(msgspec.Struct):
    """One file. It is requested first, and durable later."""

    name: str
    score: float | None = None
    durable: bool = False


class Shelf:
    """Files of one kind, oldest first, of which the newest ``keep`` durable ones stay.

    Filled on the training thread, told on the committing thread what became of it.

    Args:
        keep: how many; None keeps all.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    @property
    def newest(self) -> Entry | None:
        """The file that was requested last, unless it could not be written."""
        with self._lock:
            return self._entries[-1] if self._entries else None

    def has(self, name: str) -> bool:
        """Return True if the file is one of these."""
        with self._lock:
            return any(entry.name == name for entry in self._entries)

    def put(self, name: str, score: float | None = None) -> None:
        """Note a file that has been requested; one of the same name is what it replaces."""
        with self._lock:
            if score is None and self._entries and self._entries[-1].name == name:
                return  # asked for again: nothing may have to be written, and whatever becomes of it, there is a file
            self._entries = [entry for entry in self._entries if entry.name != name]
            self._entries.append(Entry(name, score))

    def committed(self, names: Collection[str]) -> list[str]:
        """Note that files are durable; return those that may go now."""
        with self._lock:
            for entry in self._entries:
                entry.durable = entry.durable or entry.name in names
            durable = [entry for entry in self._entries if entry.durable]
            gone = [] if self._keep is None else durable[: -self._keep]
            self._entries = [entry for entry in self._entries if entry not in gone]
            return [entry.name for entry in gone]

    def forget(self, names: Collection[str]) -> None:
        """Forget files that were not written."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.durable or entry.name not in names]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return names and scores. The requested ones are among them: whoever reads this has the file that holds it."""
        with self._lock:
            return [{"name": entry.name, "score": entry.score} for entry in self._entries]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]], exists: Callable[[object], bool]) -> None:
        """Take back those of the files that are still there."""
        with self._lock:
            self._entries = [Entry(one["name"], one["score"], durable=True) for one in state if exists(one["name"])]
