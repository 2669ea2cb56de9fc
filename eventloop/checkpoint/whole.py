"""Reading a checkpoint on one process, sharded or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eventloop.checkpoint.load import load
from eventloop.checkpoint.shards import SHARDS, verify_shards
from eventloop.checkpoint.store import AnyPath


def load_whole(path: str | os.PathLike[str] | AnyPath) -> Any:
    """Read a checkpoint on one process, with whole tensors also where the run that wrote it had them sharded.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: the file or a part beside it is not what was written.
    """
    state = load(path)
    if not (isinstance(state, Mapping) and SHARDS in state):
        return state
    verify_shards(state, path)
    from eventloop.checkpoint.sharded import put_shards  # a second to import, for whom it is worth it

    return put_shards(state, Path(str(path)), lambda place, shape, dtype: torch.empty(shape, dtype=dtype), None)
