"""The random states and positions in the data of all ranks, on their way into a file that rank 0 writes.

Each rank puts its own into the store of the process group, which costs its training thread one message. Rank 0 takes them on
the thread that writes: with thousands of ranks they are megabytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from trainbus.eventloop.checkpoint import packed
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.eventloop.training.saves.contents import as_tree
from trainbus.eventloop.training.schema import SavedRank

_PATIENCE: Final = 60.0
"""Seconds for a rank that comes late to a save."""
_POLL: Final = 0.02
"""Seconds between two looks, at most."""

log = get_logger()


class RankStates:
    """Messages of one run from all ranks to rank 0.

    ``token`` is new in each run, and the same on all ranks: torchrun's store keeps the messages of processes before a restart.
    """

    def __init__(self, ranks: Coordinator, token: str) -> None:
        self._mailbox = Mailbox(f"saves/{ranks.run}/{token}")
        self._rank = ranks.rank
        self._size = ranks.size
        self._number = self._removed = 0

    def put(self, own: SavedRank) -> Callable[[Callable[[], bool]], list[bytes]] | None:
        """Send what this rank has for the next file. Return, on rank 0, what the writing thread calls: ``_take``."""
        self._number += 1
        state = packed(as_tree(own))
        if not self._rank:
            return partial(self._take, self._number, own, state)
        self._mailbox.put(f"{self._number}/{self._rank}", state)
        return None

    def _take(self, number: int, own: SavedRank, state: bytes, hurried: Callable[[], bool]) -> list[bytes]:
        """Return what each rank has, packed. Once ``hurried()``, a rank that has sent nothing has no random states."""
        keys = [f"{number}/{rank}" for rank in range(1, self._size)]
        found: dict[str, bytes] = {}
        try:
            end, wait = time.monotonic() + _PATIENCE, 0.0005
            while not self._mailbox.has(*keys) and not hurried() and time.monotonic() < end:
                time.sleep(wait := min(2 * wait, _POLL))
            missing = {*self._mailbox.missing(keys)}
            there = [key for key in keys if key not in missing]
            found = dict(zip(there, self._mailbox.get(bytes, *there), strict=True))
            earlier = range(self._removed + 1, number + 1)  # of saves that were replaced, too
            self._mailbox.remove(f"{one}/{rank}" for one in earlier for rank in range(1, self._size))
            self._removed = number
        except (OSError, RuntimeError) as error:  # the process with the store has ended
            log.warning("the store of the process group does not answer", id="process-group-store-silent", error=str(error))
        if late := [key.rpartition("/")[2] for key in keys if key not in found]:
            log.warning(
                "ranks that sent no random states resume from a checkpoint with new ones",
                id="random-states-missing",
                ranks=", ".join(late[:20]),
            )
        return [state, *(found.get(key) or packed(as_tree(SavedRank(None, own.data))) for key in keys)]
