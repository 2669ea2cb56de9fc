"""Writing a staged tree as one file that the safetensors package opens. No pickle anywhere."""

from __future__ import annotations

import os
import time

import msgspec

from eventloop.checkpoint.digest import readable
from eventloop.checkpoint.stage import StagedTree, stage
from eventloop.checkpoint.store import AnyPath, as_path, store_of


class CommitInfo(msgspec.Struct, frozen=True):
    """A checkpoint that is on disk: where, its size in bytes, its digest, and the seconds it took without staging."""

    path: AnyPath
    bytes: int
    digest: str
    seconds: float


def write(staged: StagedTree, path: str | os.PathLike[str] | AnyPath) -> CommitInfo:
    """Write a staged tree to `path`, a file here or a URL, durably and atomically, and release it.

    Blocking; meant for a thread beside the training. The GIL is free during nearly all of it. When it fails, what had
    the name before is untouched, and `staged` is not released: it may be written elsewhere.

    Raises:
        CheckpointError: from the error of the step that failed; `staged` was released before.
        ConfigurationError: `path` is a URL, and what reaches it is not installed.
    """
    start = time.perf_counter()
    place = as_path(path)
    digest = store_of(place).write(place, staged.bytes, staged.pieces())
    staged.release()
    return CommitInfo(place, staged.bytes, readable(digest), time.perf_counter() - start)


def save(tree: object, path: str | os.PathLike[str] | AnyPath) -> CommitInfo:
    """Stage `tree` and write it to `path`.

    Raises:
        CheckpointValueError: for a value that a checkpoint cannot hold, with its path.
        CheckpointError: from the `OSError` of the step that failed.
    """
    return write(stage(tree), path)
