"""Agree on the checkpoint that all ranks resume from, where each machine may have a disk of its own.

Usually all ranks see the same files: rank 0 searches and verifies, and the others look whether the newest file that they see is
that one. If it is not, each rank searches. All take the newest good checkpoint that any of them has found, and a rank that has
it sends the file to those that have not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from torch import distributed

from trainbus.eventloop.checkpoint import AnyPath, as_path, content_of, inspect, load, outline, sharded_in
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError, TrainbusError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.distributed.ranks import own_group
from trainbus.eventloop.training.saves.discover import Found
from trainbus.eventloop.training.schema import how_far
from trainbus.eventloop.user_errors import add_note

_CHUNK: Final = 16 << 20
"""Bytes of a file that are sent at a time."""

log = get_logger()

Key = tuple[tuple[int, ...], str]
"""The progress and the digest of a checkpoint: equal for copies on several disks."""


class _View(msgspec.Struct):
    """The newest checkpoint that one rank has found."""

    path: str = ""
    key: Key | None = None
    sharded: bool = False
    error: Any = None
    """The error of its search."""


def agreed(ranks: Coordinator, find: Callable[[], Found | None], look: Callable[[], AnyPath | None]) -> Found | None:
    """Return the newest good checkpoint that any rank finds, with its tree; None if there is none. A collective.

    Args:
        ranks: all processes of the run.
        find: returns the newest checkpoint that verifies.
        look: returns the newest one by the headers alone.

    Raises:
        CheckpointDamagedError: there are checkpoints, and none is good.
        CheckpointError: some ranks cannot read sharded tensors, or a store does not answer.
    """
    if ranks.size == 1:
        return find()
    found, view = _search(find) if not ranks.rank else (None, _seen(look))
    views = ranks.distinct(view)
    if all(one.key == views[0].key and one.error is None for one in views.values()):
        if view.key is None:
            return None
        if ranks.rank:
            found = _loaded(look)
        if ranks.merged(found is not None, min):
            return found
    if ranks.rank:
        found, view = _search(find)
    return _exchanged(ranks, found, view, ranks.distinct(view))


def _exchanged(ranks: Coordinator, found: Found | None, own: _View, views: dict[int, _View]) -> Found | None:
    for rank, one in views.items():
        if one.error is not None:
            add_note(one.error, f"on rank {rank}")
    failed = [one.error for one in views.values() if one.error is not None]
    if fatal := next((error for error in failed if not isinstance(error, CheckpointDamagedError | FileNotFoundError)), None):
        raise fatal
    good = {rank: one for rank, one in views.items() if one.key is not None}
    if not good:
        if failed:
            raise failed[0]
        return None
    giver, best = max(good.items(), key=lambda one: (one[1].key, not one[1].path.rpartition("/")[2].startswith("best_")))
    lacking = [rank for rank, one in views.items() if one.key != best.key]
    if not lacking:
        return found
    if best.sharded:
        seen = "; ".join(f"rank {rank}: {views[rank].path or 'no checkpoint'}" for rank in lacking)
        raise CheckpointError(
            f"rank {giver} would resume from {best.path}, whose tensors are spread over files that not all ranks can read "
            f"({seen}): give a directory or a store that all ranks reach"
        )
    lacks = own.key != best.key
    if lacks:
        log.info("another rank has the newest checkpoint, and sends it", from_rank=giver, path=best.path)
    content = _sent(ranks, giver, None if found is None else found[0])
    if lacks:
        return as_path(best.path), load(best.path, content=content)
    return found


def _search(find: Callable[[], Found | None]) -> tuple[Found | None, _View]:
    try:
        found = find()
    except (TrainbusError, OSError) as error:
        return None, _View(error=error)
    return found, _View() if found is None else _view_of(found[0], found[1])


def _seen(look: Callable[[], AnyPath | None]) -> _View:
    try:
        path = look()
        return _View() if path is None else _view_of(path, outline(path))
    except (TrainbusError, OSError) as error:
        return _View(error=error)


def _view_of(path: AnyPath, state: Any) -> _View:
    return _View(str(path), (how_far(state), inspect(path).digest), sharded_in(state) is not None)


def _loaded(look: Callable[[], AnyPath | None]) -> Found | None:
    try:
        path = look()
        return None if path is None else (path, load(path))
    except (TrainbusError, OSError):
        return None


def _sent(ranks: Coordinator, giver: int, path: AnyPath | None) -> memoryview:
    """Send the file ``path`` of rank ``giver`` to all ranks; return its content."""
    group = own_group("control")
    source = distributed.get_global_rank(group, giver)
    data = torch.frombuffer(content_of(path), dtype=torch.uint8) if path is not None and ranks.rank == giver else None
    size = torch.tensor([0 if data is None else len(data)])
    distributed.broadcast(size, source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8) if data is None else data
    for part in torch.split(data, _CHUNK):
        distributed.broadcast(part, source, group=group)
    return data.numpy().data
