"""Writing a staged tree as one file that the safetensors package opens. No pickle anywhere."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from eventloop.checkpoint.commit import commit_file, write_all
from eventloop.checkpoint.digest import Digest, readable
from eventloop.checkpoint.stage import Staged, stage

# Below this, starting a thread for the digest takes longer than the digest.
_ALONE: Final = 1 << 20

_Pieces = tuple[bytes, memoryview, bytes]


class CommitInfo(msgspec.Struct, frozen=True):
    """A checkpoint that is on disk: where, its size in bytes, its digest, and the seconds it took without staging."""

    path: Path
    bytes: int
    digest: str
    seconds: float


def write(staged: Staged, path: str | os.PathLike[str]) -> CommitInfo:
    """Write a staged tree to `path`, durably and atomically, and release it.

    Blocking; meant for a thread beside the training. The GIL is free during nearly all of it. When it fails, what had
    the name before is untouched, and `staged` is not released: it may be written elsewhere.

    Raises:
        CheckpointError: from the `OSError` of the step that failed; `staged` was released before.
    """
    start = time.perf_counter()
    pieces = staged.pieces()
    digest = b""

    def fill(descriptor: int) -> None:
        nonlocal digest
        digest = _write_pieces(descriptor, pieces, alone=staged.bytes < _ALONE)
        write_all(descriptor, memoryview(digest))

    commit_file(path, staged.bytes, fill)
    staged.release()
    return CommitInfo(Path(path), staged.bytes, readable(digest), time.perf_counter() - start)


def save(tree: object, path: str | os.PathLike[str]) -> CommitInfo:
    """Stage `tree` and write it to `path`.

    Raises:
        CheckpointValueError: for a value that a checkpoint cannot hold, with its path.
        CheckpointError: from the `OSError` of the step that failed.
    """
    return write(stage(tree), path)


def _write_pieces(descriptor: int, pieces: _Pieces, *, alone: bool) -> bytes:
    if alone:
        _write(descriptor, pieces)
        return _digest(pieces)
    # Both only read memory that nobody writes, and both give the GIL away: the digest costs no time beside a disk.
    digest: list[bytes] = []
    thread = threading.Thread(target=lambda: digest.append(_digest(pieces)), name="trainbus-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down, and the last checkpoint matters most
        return _write_pieces(descriptor, pieces, alone=True)
    _write(descriptor, pieces)
    thread.join()
    return digest[0]


def _write(descriptor: int, pieces: _Pieces) -> None:
    for piece in pieces:
        write_all(descriptor, memoryview(piece))


def _digest(pieces: _Pieces) -> bytes:
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.stored()
