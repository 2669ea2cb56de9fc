"""``Maximum``: the largest values of all ranks, without a step that takes longer with each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import distributed

from trainbus.eventloop.training.distributed.ranks import Ranks

RING: Final = 64
"""Most ranks for gloo's ``all_reduce``. It passes values around all ranks twice (``gloo/allreduce.cc``), beside the training.
Of thousands of ranks it would not end before the next one is due."""

_TAG: Final = 1  # other messages between two ranks have 0


def waits(size: int) -> int:
    """Return how many messages of a :class:`Maximum` of ``size`` ranks the calling thread waits for, one after the other."""
    return 1 if size <= RING else (size - 1).bit_length()


class Maximum:
    """The maximum of each element of a tensor over all ranks, in place. A collective that begins beside the calling thread.

    Up to :data:`RING` ranks it also ends there. With more, each rank sends what it has to the rank that is 1, 2, 4 … further,
    and takes the maximum with what comes from the other side. A value may come twice, which does not change a maximum, so the
    number of ranks need not be a power of 2. Only the first of these messages is sent beside the calling thread.
    """

    def __init__(self, ranks: Ranks, values: torch.Tensor) -> None:
        self._ranks, self._values, self._received = ranks, values, torch.empty_like(values)
        self._ring: distributed.Work | None = None
        self._first: list[distributed.Work] = []
        if ranks.size <= RING:
            self._ring = distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=ranks.group, async_op=True)
        else:
            self._first = self._exchange(1)

    def is_completed(self) -> bool:
        """Return True if :meth:`steps` would not wait; False also if that is unknown."""
        return self._ring is not None and self._ring.is_completed()

    def steps(self) -> Iterator[None]:
        """Yield each time that the tensor has the maximum over more ranks; at the last time, over all. Call it once."""
        if self._ring is not None:
            self._ring.wait()
            yield
            return
        works, distance = self._first, 1
        while works:
            for work in works:
                work.wait()
            torch.maximum(self._values, self._received, out=self._values)
            yield
            distance *= 2
            works = self._exchange(distance) if distance < self._ranks.size else []

    def _exchange(self, distance: int) -> list[distributed.Work]:
        rank, size, group = self._ranks.rank, self._ranks.size, self._ranks.group
        received = distributed.irecv(self._received, (rank - distance) % size, group=group, tag=_TAG)
        sent = distributed.isend(self._values, (rank + distance) % size, group=group, tag=_TAG)
        return [work for work in (received, sent) if work is not None]  # None only outside of the group
