"""What belongs to a checkpoint of sharded state beside its file: the directory with the tensors (see ``checkpoint.sharded``).

Apart from it because ``torch.distributed.checkpoint`` takes a second to import, and most runs never need it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from eventloop.checkpoint.bounds import file_size, is_plain_name, read_small
from eventloop.checkpoint.digest import CHUNK, Digest, readable
from eventloop.checkpoint.load import outline
from eventloop.checkpoint.shard_index import INDEX, MAX_INDEX_BYTES, all_pieces, read_index
from eventloop.errors import CheckpointDamagedError, CheckpointError

SUFFIX: Final = ".shards"
SHARDS: Final = "shards"
"""Key of the tree under which the directory is named."""

DIGESTS: Final = "digests.json"
_STILL: Final = 60.0  # seconds without a change after which nobody can be writing a directory


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True if parameters of ``model`` are spread over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # where it was never imported, there are none
    return tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters())


def shards_of(state: Mapping[str, Any], path: Path) -> Path:
    """Return the directory with the sharded tensors of the checkpoint ``path``.

    Raises:
        CheckpointDamagedError: the checkpoint names a directory that does not belong to it.
    """
    name = state[SHARDS]
    if not (is_plain_name(name) and name.endswith(SUFFIX)):
        raise CheckpointDamagedError(f"{name!r} does not name a directory with sharded tensors beside it")
    directory = path.with_name(name)
    if directory.is_symlink():
        raise CheckpointDamagedError(f"{directory} is a link, which is not followed")
    return directory


def verify_shards(state: Any, path: object) -> None:
    """Read the sharded tensors of a checkpoint once, if it has any, and compare their digests.

    Raises:
        CheckpointDamagedError: a part is missing, or other than what was written.
    """
    if not (isinstance(state, Mapping) and SHARDS in state):
        return
    file = Path(str(path))
    with naming_damage(file):
        directory = shards_of(state, file)
        wanted: dict[str, str] = {}
        for digests in directory.glob(f"*.{DIGESTS}"):
            wanted |= msgspec.json.decode(read_small(digests, MAX_INDEX_BYTES), type=dict[str, str])
        if INDEX not in wanted:
            raise CheckpointDamagedError(f"{directory} is not there in full")
        if unknown := {piece.file for piece in all_pieces(read_index(directory))} - wanted.keys():
            raise CheckpointDamagedError(f"{directory} has no digests of {', '.join(sorted(unknown))}")
        for name, digest in wanted.items():
            if not is_plain_name(name):
                raise CheckpointDamagedError(f"{directory} has a digest of {name!r}, which is not a file of it")
            file_size(directory / name)  # it is a regular file
            if digest_of(directory / name) != digest:
                raise CheckpointDamagedError(f"{directory / name} has other bytes than were written")


def sweep_shards(directory: Path, *, still: float = _STILL) -> bool:
    """Remove directories of sharded tensors that no checkpoint in ``directory`` names.

    Args:
        directory: of checkpoints.
        still: seconds without a change after which nobody can be writing one.

    Returns:
        True if there were any of these directories, named or not.
    """
    found = [one for one in directory.glob(f"*{SUFFIX}") if one.is_dir()]
    if not found:
        return False
    named = set()
    for file in directory.glob("*.safetensors"):
        try:
            tree = outline(file)
        except (CheckpointError, OSError):
            return True  # it may name any of them
        named.add(str(tree.get(SHARDS)) if isinstance(tree, Mapping) else "")
    for one in found:
        if one.name not in named and time.time() - one.stat().st_mtime >= still:
            shutil.rmtree(one, ignore_errors=True)
    return True


def digest_of(file: Path) -> str:
    """Return the digest of a file, and have it durable."""
    digest = Digest()
    with file.open("rb", buffering=0) as opened:
        while part := opened.read(CHUNK):
            digest.update(part)
        if opened.seekable():
            os.fsync(opened.fileno())
    return readable(digest.stored())


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Say of what cannot be read that ``path`` is damaged."""
    try:
        yield
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error}") from error
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, msgspec.MsgspecError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: its sharded tensors cannot be read ({error})") from error
