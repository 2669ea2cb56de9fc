"""``Collectives``: the coordinator of the ranks of a loop of one's own.

All messages use a separate gloo process group on the CPU, so they never wait for an accelerator or for collectives of the
training.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Timer
from typing import Any, Final

import torch
from torch import distributed

from trainbus.eventloop.errors import TrainbusError, TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.coordinator import TOGETHER, Coordinator, Requests, T, first

INTERVAL = 0.05
"""Seconds between two exchanges of requests, for each message that one waits for; 0 exchanges in every iteration."""

PATIENCE = 10.0
"""Seconds after which a process logs why it waits."""

RING: Final = 64
"""Most ranks for gloo's ``all_reduce``. It passes values around all ranks twice (``gloo/allreduce.cc``), beside the training.
Of thousands of ranks it would not end before the next one is due."""

_MOST_BETWEEN: Final = 1000
_TAG: Final = 1  # other messages between two ranks have 0

log = get_logger()


class Collectives(Coordinator):
    """Make requests of any rank take effect on all ranks after the same iteration, and exchange values.

    During training, exchanges of requests run in the background: a request takes effect at the end of a later iteration, after
    up to :data:`INTERVAL` seconds or one iteration, whichever is longer. An exchange costs about 200 µs, so short iterations
    share one. ``agree(between=True)``, at the end of epochs and validations, waits for the result. For more than :data:`RING`
    ranks, see :class:`Maximum`.

    Each exchange also compares the files that hooks request. All ranks must request the same files, or the run would hang: one
    rank would wait in its save, and the others in their next collective.

    :meth:`merged` and what uses it take a logarithmic number of messages one after the other.

    Args:
        group: the processes.
        own: the requests of this rank.
        waiting: surrounds the time in which this rank waits for messages.
        run: the number of this run in the process.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        own: Requests | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        run: int = 0,
    ) -> None:
        super().__init__(own)
        self.agreed = Requests()
        self.rank, self.size, self.run = distributed.get_rank(group), distributed.get_world_size(group), run
        self._group = weakref.ref(group)  # see own_group()
        self._waiting = waiting
        self._flags = torch.zeros(8, dtype=torch.int32)
        self._sent: list[str] = []
        self._every = 1
        self._since = 0
        self._started: float | None = None
        self._under_way: Maximum | None = None

    @property
    def group(self) -> distributed.ProcessGroup:
        """The process group; RuntimeError if it was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError("torch.distributed.destroy_process_group() was called during a run; call it after the run")
        return group

    # ---------------------------------------------------------------------------------------------------------- values

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        values: list[Any] = [None] * self.size
        with self._waiting():
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, find: Callable[[], T]) -> T:
        """Return on all ranks what ``find`` returns on rank 0, or raise its TrainbusError."""
        found: list[Any] = [None]
        if not self.rank:
            try:
                found = [find()]
            except TrainbusError as error:
                found = [error]
        with self._waiting():
            distributed.broadcast_object_list(found, src=0, group=self.group)
        if isinstance(found[0], TrainbusError):
            raise found[0]
        return found[0]  # type: ignore[no-any-return]

    def merged(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return on all ranks the values of all, merged: up a binary tree to rank 0, and down again."""
        distance = 1
        while distance < self.size and not self.rank & distance:
            if self.rank + distance < self.size:
                other: list[Any] = [None]
                with self._waiting():
                    distributed.recv_object_list(other, self.rank + distance, group=self.group)
                value = merge(value, other[0])
            distance *= 2
        if self.rank:
            with self._waiting():
                distributed.send_object_list([value], self.rank - distance, group=self.group)
        return self.from_first(lambda: value)

    def distinct(self, value: T) -> dict[int, T]:
        """Return each different value of the ranks once, by the lowest rank that has it, in the order of ranks."""
        return self.merged({self.rank: value}, _united)

    def from_all(self, find: Callable[[], T]) -> list[T]:
        """Return each different result of ``find`` on the ranks, or raise the first TrainbusError of them on all ranks."""
        try:
            found: Any = find()
        except TrainbusError as error:
            found = error
        everyones = [*self.distinct(found).values()]
        for one in everyones:
            if isinstance(one, TrainbusError):
                raise one
        return everyones

    # -------------------------------------------------------------------------------------------------------- requests

    def agree(self, *, between: bool = False) -> Requests:
        """Apply the result of the previous exchange and begin the next, if one is due; ``between`` iterations, a barrier."""
        if between:
            self._take()
            self._launch([])  # rank 0 decides about saves at the end of a scope
            self._take()
            return self.agreed
        self._since += 1
        if self._since >= self._every:
            self._take()
            self._launch(self.own.files())
        return self.agreed

    def confirm(self) -> None:
        """Wait until all ranks have requested the files that this rank has; raise TrainingError if one requests others.

        A rank that is already in a collective of the training may never answer; then a warning tells the reason.
        """
        asked = self.own.files()
        if self._under_way is None or self._sent != asked:
            self._take()
            self._launch(asked)
        self._take()

    def _launch(self, asked: list[str]) -> None:
        self._sent = asked
        digest = zlib.crc32("/".join(asked).encode()) >> 1
        # The exchange takes the maximum over ranks. The pace is negated to get the smallest one. The digest is sent with both
        # signs: if all ranks have the same, both come back unchanged.
        own, save = self.own, False
        if own.save:  # first: a signal handler may request another one between these lines
            own.save = False
            save = not self.agreed.save  # one that is due here holds all that was requested before, by any rank
        flags = (own.stop, save, own.cancelled, own.paused, bool(own.rates), -self._pace(), digest, -digest)
        self._flags.copy_(torch.tensor(flags, dtype=torch.int32))
        self._under_way = Maximum(self, self._flags)

    def _pace(self) -> int:
        now, before = time.perf_counter(), self._started
        iterations, self._since, self._started = self._since, 0, now
        if before is None or not iterations or not INTERVAL:
            return 1
        return max(1, min(_MOST_BETWEEN, int(INTERVAL * waits(self.size) * iterations / (now - before))))

    def _take(self) -> None:
        if self._under_way is None:
            return
        self._wait_for(self._under_way)
        self._under_way = None
        stop, save, cancelled, paused, rates, fewest, *_ = self._flags.tolist()
        self._every = -fewest
        agreed = self.agreed
        if stop and not agreed.stop:
            asked = self.distinct((self.own.reason, self.own.instead, self.own.exit_code)).values()
            reasons, ways_out, codes = zip(*asked, strict=True)
            agreed.reason, agreed.instead = first(reasons), first(ways_out)
            agreed.exit_code = max(codes)
        if rates:
            agreed.rates.extend(one for some in self.distinct(self.own.take_rates()).values() for one in some)
        agreed.stop = agreed.stop or bool(stop)
        agreed.save = agreed.save or bool(save)
        agreed.cancelled = agreed.cancelled or bool(cancelled)
        agreed.paused = bool(paused)

    def _wait_for(self, maximum: Maximum) -> None:
        impatient: Timer | None = None
        if self._sent and not maximum.is_completed():
            told = f"waiting for the other ranks to request this checkpoint. {TOGETHER}"
            impatient = Timer(PATIENCE, partial(log.warning, told, id="save-waits-for-ranks", names=self._sent))
            impatient.daemon = True
            impatient.start()
        try:
            with self._waiting():
                for _ in maximum.steps():
                    self._check_files()  # after each step: a rank that requests other files may take no further one
        finally:
            if impatient is not None:
                impatient.cancel()

    def _check_files(self) -> None:
        *_, digest, negative = self._flags.tolist()
        if digest != -negative:
            mine = f"rank {self.rank} requests {', '.join(self._sent) or 'none'}"
            raise TrainingError(f"the ranks request different checkpoints at the same time: {mine}. {TOGETHER}")


def _united(lower: dict[int, T], higher: dict[int, T]) -> dict[int, T]:
    known = [*lower.values()]
    return lower | {rank: value for rank, value in higher.items() if value not in known}


def waits(size: int) -> int:
    """Return how many messages of a :class:`Maximum` of ``size`` ranks the calling thread waits for, one after the other."""
    return 1 if size <= RING else (size - 1).bit_length()


class Maximum:
    """The maximum of each element of a tensor over all ranks, in place. A collective that begins beside the calling thread.

    Up to :data:`RING` ranks it also ends there. With more, each rank sends what it has to the rank that is 1, 2, 4 … further,
    and takes the maximum with what comes from the other side. A value may come twice, which does not change a maximum, so the
    number of ranks need not be a power of 2. Only the first of these messages is sent beside the calling thread.
    """

    def __init__(self, ranks: Collectives, values: torch.Tensor) -> None:
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
