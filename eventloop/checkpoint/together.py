"""``Together``: what several processes do at the same time, so that all of them go on or all of them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.user_errors import described

T = TypeVar("T")


class Together:
    """The processes of a group; all of them call the methods, in one order.

    Args:
        group: used for nothing else at the same time; None for a process that is alone.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.size = 1 if group is None else distributed.get_world_size(group)

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def gather(self, own: T) -> list[T]:
        """Return what all processes have, on rank 0; an empty list on others."""
        if self._group is None:
            return [own]
        everyones: list[Any] | None = [None] * self.size if self.first else None
        distributed.gather_object(own, everyones, group=self._group, group_dst=0)
        return everyones or []

    def share(self, own: T) -> list[T]:
        """Return what all processes have, by rank."""
        everyones: list[Any] = [own] * self.size
        if self._group is not None:
            distributed.all_gather_object(everyones, own, group=self._group)
        return everyones

    def from_first(self, own: T) -> T:
        """Return what rank 0 has."""
        shared = [own]
        if self._group is not None:
            distributed.broadcast_object_list(shared, group=self._group, group_src=0)
        return shared[0]

    def do(self, what: str, act: Callable[[], T]) -> T:
        """Call ``act``, and return its result.

        Raises:
            CheckpointError: it failed on a process; the text begins with ``what`` and names the ranks that failed.
        """
        result, problem, cause = None, "", None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - raised below, on all processes
            problem, cause = described(error), error
        if problems := self._problems(problem):
            raise CheckpointError(f"{what}: {'; '.join(problems)}") from cause
        return result  # type: ignore[return-value]

    def _problems(self, own: str) -> list[str]:
        if self._group is not None:
            failed = torch.tensor(int(bool(own)))  # the usual case, with no message from each process to each
            distributed.all_reduce(failed, group=self._group)
            if not failed:
                return []
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(self.share(own)) if problem]
