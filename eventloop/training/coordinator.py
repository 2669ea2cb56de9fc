"""``Coordinator``: what the ranks of a run agree on, so that ``run.stop()`` of one takes effect on all at the same point.

A run has one at a time, with one interface and two transports. In a loop of one's own the ranks meet in collectives
(:class:`trainbus.eventloop.training.distributed.collectives.Collectives`). In another library's trainer a rank may lack a bus
or evaluate alone, so that a collective would hang or mix with the trainer's; there they write to the store of the process
group (:class:`trainbus.eventloop.training.distributed.rounds.Rounds`).

The store could not serve loops as well. A rank that asks alone waits until the others have looked, up to 0.1 s, and they wait
for it in the collectives of the training; an exchange delays none. And without a collective, a rank that alone requests a save
would hang in it, in place of an error that names the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from trainbus.eventloop.errors import TrainingError
from trainbus.eventloop.training.distributed.layout import RankLayout

TOGETHER: Final = (
    "All ranks must call run.checkpoints.save(name) at the same mount point: not under a condition on run.rank, nor in a "
    'handler with ranks="rank0". Any rank may call run.checkpoints.save() without a name'
)

Rates = list[tuple[float, tuple[str, ...]]]
"""Learning rates to set, and the names of their optimizers."""

T = TypeVar("T")


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


class Coordinator:
    """Agree and exchange values with the other ranks. This class is that of one process: it agrees with itself at once.

    All methods but :meth:`agree` and :meth:`close` are collectives: all ranks must call them at one point.

    Args:
        own: the requests of this rank.
    """

    rank = 0
    size = 1
    """The number of ranks that exchange values. It is 1 in another library's trainer, too."""
    run = 0
    """The number of this run in the process; equal on all ranks."""
    pauses_at_once = False
    """True if a pause begins where ``agree(between=True)`` applies it, and not at the next safe mount point."""

    def __init__(self, own: Requests | None = None) -> None:
        self.own = own or Requests()
        self.agreed = self.own
        """The requests that take effect on all ranks."""
        self.layout = RankLayout()
        """Which ranks hold which weights."""

    def agree(self, *, between: bool = False) -> Requests:
        """Return the requests that take effect at the end of this iteration, or ``between`` two of them."""
        return self.agreed

    def confirm(self) -> None:
        """Wait until all ranks have requested the files that this one has; raise TrainingError if one requests others."""

    def close(self) -> None:
        """Agree no longer. What has stopped all ranks stays known in the requests of this one."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. Takes time and memory in proportion to their number."""
        return [value]

    def from_first(self, find: Callable[[], T]) -> T:
        """Return on all ranks what ``find`` returns on rank 0, or raise its TrainbusError."""
        return find()

    def merged(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return on all ranks the values of all, merged: ``merge`` is associative, and gets the lower ranks first."""
        return value

    def distinct(self, value: T) -> dict[int, T]:
        """Return each different value of the ranks once, by the lowest rank that has it, in the order of ranks."""
        return {self.rank: value}

    def from_all(self, find: Callable[[], T]) -> list[T]:
        """Return each different result of ``find`` on the ranks, or raise the first TrainbusError of them on all ranks."""
        return [find()]

    def check_first_has_all(self, names: Mapping[int, list[str]]) -> None:
        """Raise TrainingError if a rank requests a file that rank 0 does not; ``names`` holds the file names by rank."""
        for rank, wanted in names.items():
            if more := [name for name in wanted if name not in names[0]]:
                raise TrainingError(f"rank {rank} requests the checkpoint {', '.join(more)}, but rank 0 does not. {TOGETHER}")
