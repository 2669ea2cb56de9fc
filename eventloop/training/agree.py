"""The channel between ranks: requests such as ``run.stop()`` take effect on all ranks at the same point.

A run has one :class:`Channel`. Alone, its own requests take effect at once. In a loop of one's own, the ranks agree by
collectives (:class:`Agreement`). In another library's trainer a collective could hang or mix with the trainer's; there they
agree over the store of the process group (:class:`trainbus.eventloop.training.distributed.rounds.Rounds`).
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Timer
from typing import Final, Protocol

import torch

from trainbus.eventloop.errors import TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.distributed.maximum import Maximum, waits
from trainbus.eventloop.training.distributed.ranks import TOGETHER, Ranks

INTERVAL = 0.05
"""Seconds between two exchanges of :class:`Agreement`, for each message that one waits for; 0 exchanges in every iteration."""

PATIENCE = 10.0
"""Seconds after which a process logs why it waits."""

_MOST_BETWEEN: Final = 1000

log = get_logger()

Rates = list[tuple[float, tuple[str, ...]]]
"""Learning rates to set, and the names of their optimizers."""


class Requests:
    """The requests of one rank, or those that all ranks have agreed on."""

    def __init__(self) -> None:
        # Not threading.Event: signal handlers set these, and its lock is not re-entrant.
        self.stop = self.save = self.cancelled = self.paused = False
        self.reason = ""
        """The reason of a stop."""
        self.instead = ""
        """What to do instead of resuming as it is, if a resumed run would stop again; empty if it would go on."""
        self.exit_code = 0
        """The exit status of the process after a stop; 0 if the program goes on."""
        self.rates: deque[tuple[float, tuple[str, ...]]] = deque()
        """Learning rates to set, and the names of their optimizers."""
        self.files: Callable[[], list[str]] = list
        """Returns the names of the files that hooks want to save next."""

    def take_rates(self) -> Rates:
        """Remove and return the learning rates to set."""
        return [self.rates.popleft() for _ in range(len(self.rates))]


def first(texts: Iterable[str]) -> str:
    """Return the first text that is not empty, or an empty one."""
    return next(filter(None, texts), "")


class Channel(Protocol):
    """How the ranks of a run agree."""

    agreed: Requests
    """The requests that take effect on all ranks."""
    ranks: Ranks | None
    """All processes, where collectives are possible; None if there is only one, or another library's trainer."""
    pauses_at_once: bool
    """True if a pause begins where :meth:`settle` applies it, and not at the next safe mount point."""

    def exchange(self) -> None:
        """Apply what has been agreed on up to the end of this iteration."""

    def settle(self) -> None:
        """Apply what has been agreed on at a point between two iterations."""


class Alone:
    """The channel of a run with one process: its own requests are agreed on."""

    ranks: Ranks | None = None
    pauses_at_once = False

    def __init__(self, own: Requests) -> None:
        self.agreed = own

    def exchange(self) -> None:
        """All is agreed on."""

    def settle(self) -> None:
        """All is agreed on."""


class Agreement:
    """Make requests of any rank (:class:`Requests`) take effect on all ranks after the same iteration.

    During training, exchanges run in the background: a request takes effect at the end of a later iteration, after up to
    :data:`INTERVAL` seconds or one iteration, whichever is longer. An exchange costs about 200 µs, so short iterations share
    one. At the end of epochs and validations :meth:`settle` waits for the result. For more than 64 ranks, see
    :class:`trainbus.eventloop.training.distributed.maximum.Maximum`.

    Each exchange also compares the files that hooks request. All ranks must request the same files, or the run would hang: one
    rank would wait in its save, and the others in their next collective.

    ``own`` has the requests of this rank.
    """

    pauses_at_once = False

    def __init__(self, ranks: Ranks, own: Requests) -> None:
        self.ranks: Ranks | None = ranks
        self.agreed = Requests()
        self._ranks, self._own = ranks, own
        self._flags = torch.zeros(8, dtype=torch.int32)
        self._sent: list[str] = []
        self._every = 1
        self._since = 0
        self._started: float | None = None
        self._under_way: Maximum | None = None

    def exchange(self) -> None:
        """If an exchange is due, apply the result of the previous one and begin the next."""
        self._since += 1
        if self._since < self._every:
            return
        self._take()
        self._launch(self._own.files())

    def settle(self) -> None:
        """Exchange and apply all requests made so far. A barrier."""
        self._take()
        self._launch([])  # rank 0 decides about saves at the end of a scope
        self._take()

    def confirm(self) -> None:
        """Wait until all ranks have requested the files that this rank has; raise TrainingError if one requests others.

        A rank that is already in a collective of the training may never answer; then a warning tells the reason.
        """
        asked = self._own.files()
        if self._under_way is None or self._sent != asked:
            self._take()
            self._launch(asked)
        self._take()

    def _launch(self, asked: list[str]) -> None:
        self._sent = asked
        digest = zlib.crc32("/".join(asked).encode()) >> 1
        # The exchange takes the maximum over ranks. The pace is negated to get the smallest one. The digest is sent with both
        # signs: if all ranks have the same, both come back unchanged.
        own, save = self._own, False
        if own.save:  # first: a signal handler may request another one between these lines
            own.save = False
            save = not self.agreed.save  # one that is due here holds all that was requested before, by any rank
        flags = (own.stop, save, own.cancelled, own.paused, bool(own.rates), -self._pace(), digest, -digest)
        self._flags.copy_(torch.tensor(flags, dtype=torch.int32))
        self._under_way = Maximum(self._ranks, self._flags)

    def _pace(self) -> int:
        now, before = time.perf_counter(), self._started
        iterations, self._since, self._started = self._since, 0, now
        if before is None or not iterations or not INTERVAL:
            return 1
        return max(1, min(_MOST_BETWEEN, int(INTERVAL * waits(self._ranks.size) * iterations / (now - before))))

    def _take(self) -> None:
        if self._under_way is None:
            return
        self._wait_for(self._under_way)
        self._under_way = None
        stop, save, cancelled, paused, rates, fewest, *_ = self._flags.tolist()
        self._every = -fewest
        agreed = self.agreed
        if stop and not agreed.stop:
            asked = self._ranks.distinct((self._own.reason, self._own.instead, self._own.exit_code)).values()
            reasons, ways_out, codes = zip(*asked, strict=True)
            agreed.reason, agreed.instead = first(reasons), first(ways_out)
            agreed.exit_code = max(codes)
        if rates:
            agreed.rates.extend(one for some in self._ranks.distinct(self._own.take_rates()).values() for one in some)
        agreed.stop = agreed.stop or bool(stop)
        agreed.save = agreed.save or bool(save)
        agreed.cancelled = agreed.cancelled or bool(cancelled)
        agreed.paused = bool(paused)

    def _wait_for(self, maximum: Maximum) -> None:
        impatient: Timer | None = None
        if self._sent and not maximum.is_completed():
            told = f"waiting for the other ranks to request this checkpoint. {TOGETHER}"
            impatient = Timer(PATIENCE, partial(log.warning, told, names=self._sent))
            impatient.daemon = True
            impatient.start()
        try:
            with self._ranks.waiting():
                for _ in maximum.steps():
                    self._check_files()  # after each step: a rank that requests other files may take no further one
        finally:
            if impatient is not None:
                impatient.cancel()

    def _check_files(self) -> None:
        *_, digest, negative = self._flags.tolist()
        if digest != -negative:
            mine = f"rank {self._ranks.rank} requests {', '.join(self._sent) or 'none'}"
            raise TrainingError(f"the ranks request different checkpoints at the same time: {mine}. {TOGETHER}")
