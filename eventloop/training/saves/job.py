"""``SaveJob``: one state on its way to its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from eventloop.checkpoint import AnyPath, RemotePath, StagedTree
from eventloop.events import Progress
from eventloop.training.saves.requests import SaveRequest

if TYPE_CHECKING:  # a second to import, and only sharded models need it
    from eventloop.checkpoint.sharded import Parts


class SaveJob(msgspec.Struct, eq=False):
    """One save: a staged state, or an earlier job with the same state, and the names of its file."""

    request: SaveRequest
    paths: list[AnyPath]
    progress: Progress
    version: tuple[int, ...] = ()
    """Version of the state."""
    staged: StagedTree | None = None
    stall: float = 0.0
    """Seconds that the training thread spent on it."""
    source: SaveJob | None = None
    given_up: str = ""
    """The reason why it is not written; empty otherwise."""
    states: Callable[[Callable[[], bool]], list[bytes]] | None = None
    """Returns the random states of all ranks, for rank 0; see ``RankStates``. None if there is one rank, and once taken."""
    parts: Parts | None = None
    """This process's part of a sharded state."""
    retry: bool = False
    """True to upload what ``source`` keeps for stores."""
    number: int = -1
    """The position among the written states; -1 for one that is not written yet, or of another training."""
    held: list[AnyPath] = []
    """The durable files with this state, oldest first."""
    kept: Path | None = None
    """The file among them, in the work dir, that waits for stores;"""
    waiting: list[RemotePath] = []
    """what it waits for."""
    refusal: Exception | None = None
    """The last error of a store."""
    lost: bool = False
    """True if no file with this state could be written."""

    def release(self) -> None:
        """Release the memory of the staged state."""
        for one in (self.staged, self.parts):
            if one is not None:
                one.release()
