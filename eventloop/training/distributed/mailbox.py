"""``Mailbox``: messages between ranks in the store of their process group, without a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from trainbus.eventloop.privates import default_store, second_connection

T = TypeVar("T")


def missing_of(are_there: Callable[[Sequence[str]], bool], keys: Sequence[str]) -> list[str]:
    """Return the keys that are not there, by halves: thousands of ranks are too many to ask for each."""
    if not keys or are_there(keys):
        return []
    if len(keys) == 1:
        return [*keys]
    half = len(keys) // 2
    return missing_of(are_there, keys[:half]) + missing_of(are_there, keys[half:])


class Mailbox:
    """Messages by key: any rank puts them, all ranks read them. No call waits for another rank.

    If the process with the store hangs, so does the thread that calls; if it ends, a RuntimeError or OSError is raised.

    Args:
        name: the beginning of all keys; equal on all ranks.
        store: by default, the one of the process group.
    """

    def __init__(self, name: str, store: Any = None) -> None:
        self._store = second_connection(store or default_store())
        self._name = name

    def put(self, key: str, message: object = None) -> None:
        """Put a message, in place of the one before."""
        self._store.set(self._whole(key), msgspec.msgpack.encode(message))

    def offer(self, key: str, message: object) -> None:
        """Put a message, unless there is one."""
        self._store.compare_set(self._whole(key), "", msgspec.msgpack.encode(message))

    def has(self, *keys: str) -> bool:
        """Return True if all of these messages are there."""
        return bool(self._store.check([self._whole(key) for key in keys]))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of messages that are not there. Takes one round trip if all are, and few if few are not."""
        return missing_of(lambda some: self.has(*some), keys)

    def get(self, kind: type[T], *keys: str) -> list[T]:
        """Return messages that are there, in one round trip if the store can."""
        whole = [self._whole(key) for key in keys]
        many = self._store.has_extended_api() and whole
        texts = self._store.multi_get(whole) if many else [self._store.get(key) for key in whole]
        return [msgspec.msgpack.decode(text, type=kind) for text in texts]

    def remove(self, keys: Iterable[str]) -> None:
        """Remove messages that are there."""
        for key in keys:
            self._store.delete_key(self._whole(key))

    def _whole(self, key: str) -> str:
        return f"trainbus/{self._name}/{key}"
