"""The pieces of a checkpoint file, and the digest of them that ends it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

from eventloop.checkpoint.commit import write_all
from eventloop.checkpoint.digest import Digest, chunks

Pieces = tuple[bytes, memoryview, bytes]
"""Header, tensors, tree."""

# Below this, the digest takes no longer than starting a thread and syncing twice.
_ALONE: Final = 8 << 20


def write_sealed(descriptor: int, pieces: Pieces) -> bytes:
    """Write the pieces and their digest to a file descriptor, and return the digest."""
    digest = _write_pieces(descriptor, pieces, alone=sum(map(len, pieces)) < _ALONE)
    write_all(descriptor, memoryview(digest))
    return digest


def sealed(pieces: Pieces) -> Iterator[memoryview]:
    """The bytes of the pieces in bounded parts; the digest is the last one."""
    digest = Digest()
    for piece in pieces:
        for part in chunks(memoryview(piece)):
            digest.update(part)
            yield part
    yield memoryview(digest.stored())


def _write_pieces(descriptor: int, pieces: Pieces, *, alone: bool) -> bytes:
    _write(descriptor, pieces)
    if alone:
        return _digest(pieces)
    # The digest is made while the disk works, which takes nothing but time: beside the writing it would be one more busy
    # thread, and on few cores the training pays for that. Measured on 800 MB: 0.8 times the seconds of that, too.
    failures: list[OSError] = []
    thread = threading.Thread(target=_sync_beside, args=(descriptor, failures), name="trainbus-sync", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down, and the last checkpoint matters most
        return _digest(pieces)
    try:
        return _digest(pieces)
    finally:
        thread.join()
        if failures:  # told once by the system: a later sync of this file might well succeed
            raise failures[0]


def _sync_beside(descriptor: int, failures: list[OSError]) -> None:
    try:
        # Of the data so far; the caller syncs the rest, once the file is complete.
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)
    except OSError as error:
        failures.append(error)


def _write(descriptor: int, pieces: Pieces) -> None:
    for piece in pieces:
        write_all(descriptor, memoryview(piece))


def _digest(pieces: Pieces) -> bytes:
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.stored()
