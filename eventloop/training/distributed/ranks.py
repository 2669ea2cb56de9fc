"""Several processes: the rank of this one, agreement of all ranks, and how a failure of one ends the others.

Everything here goes over a process group of its own (gloo, so over the CPU): it never waits for an accelerator, and never
meets the collectives of the training.
"""

from __future__ import annotations

import re
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from eventloop.bus import Bus
from eventloop.checkpoint import is_sharded
from eventloop.errors import ConfigurationError, TrainingError
from eventloop.log import get_logger

INTERVAL = 0.05
"""Seconds between two exchanges of :class:`Agreement`; 0 for one in every iteration."""

PATIENCE = 10.0
"""Seconds after which a process logs why it waits."""

_MOST_BETWEEN: Final = 1000
_FAILURE: Final = "trainbus/failure"
_STORE_TIMEOUT: Final = timedelta(seconds=5)
_ANSWER: Final = 2.0  # seconds between the errors of ranks that waited for the same one
_TIMED_OUT: Final = re.compile(r"time(d |-)?out", re.IGNORECASE)
_TOGETHER: Final = (
    "run.request_save() is for all ranks, at the same mount point, or for none: no condition on run.rank, and no handler with "
    'ranks="rank0" may call it. run.checkpoint_now() is for any rank'
)

log = get_logger()


def this_rank() -> int:
    """Return the rank of this process in ``torch.distributed``'s default group; 0 without one."""
    return distributed.get_rank() if world_size() > 1 else 0


def world_size() -> int:
    """Return the number of processes in ``torch.distributed``'s default group; 1 without one."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def check_initialized() -> None:
    """Raise ConfigurationError if ``torchrun`` started several processes, and they do not know of each other."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()) or distributed.is_initialized():
        return
    raise ConfigurationError(
        "torchrun started this process, but torch.distributed is not initialised: every process would train alone and write "
        "the same files. Call torch.distributed.init_process_group() before the run, and wrap the model in "
        "DistributedDataParallel (or fully_shard it)"
    )


class Ranks:
    """All processes of a run, seen from one. Every method is a collective: all ranks call it at the same point.

    Args:
        group: a CPU process group of its own.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._group = weakref.ref(group)  # see _groups

    @property
    def group(self) -> distributed.ProcessGroup:
        """The group.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "torch.distributed.destroy_process_group() was called while a run goes on; call it after the run"
            )
        return group

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value."""
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def check_first_has_all(self, names: list[list[str]]) -> None:
        """Raise TrainingError if a rank wants to save what rank 0 does not.

        Args:
            names: of the files, for each rank.
        """
        for rank, wanted in enumerate(names):
            if more := [name for name in wanted if name not in names[0]]:
                raise TrainingError(f"rank {rank} asks for the checkpoint {', '.join(more)}, and rank 0 does not. {_TOGETHER}")


class Wishes(NamedTuple):
    """The requests of one rank, or of all ranks together."""

    stop: bool = False
    save: bool = False
    cancelled: bool = False
    paused: bool = False
    rates: bool = False


class Agreement:
    """What some rank has asked for, known to all ranks at the same moment: see :class:`Wishes`.

    In the middle of training it is asked without waiting: what is asked for within an iteration is collected beside those that
    follow, and holds at the end of one of them. That takes up to :data:`INTERVAL` seconds or one iteration, whichever is
    longer, as an exchange costs some 200 µs: between two there are as many iterations as take that long. :meth:`settle` waits,
    at the ends of epochs and validations.

    Each exchange also tells which files a hook has asked for. All ranks have to ask for the same: one that saves alone would
    wait for the others, and they, in their next collective, for it.

    Args:
        ranks: all processes.
        wishes: returns what this rank wants.
        reason: returns why it wants a stop.
    """

    def __init__(self, ranks: Ranks, wishes: Callable[[], Wishes], reason: Callable[[], str]) -> None:
        self.ranks = ranks
        self.stop, self.save, self.cancelled, self.paused, self.rates = Wishes()
        self.reason = ""
        self.asked: Callable[[], list[str]] = list
        """Returns the names of the files that are to be saved next."""
        self._wishes = wishes
        self._reason = reason
        self._flags = torch.zeros(len(Wishes._fields) + 3, dtype=torch.int32)
        self._told: list[str] = []
        self._every = 1
        self._since = 0
        self._started: float | None = None
        self._under_way: distributed.Work | None = None

    def exchange(self) -> None:
        """Take what was asked for by the exchange before, and begin the next one, if it is time for it."""
        self._since += 1
        if self._since < self._every:
            return
        self._take()
        self._launch(self.asked())

    def settle(self) -> None:
        """Take everything that was asked for up to now. It is a barrier, too."""
        self._take()
        self._launch([])  # rank 0 decides about saves at the end of a scope
        self._take()

    def confirm(self) -> None:
        """Wait until all ranks have asked for the files that this one has asked for.

        Raises:
            TrainingError: one has not. If it is in a collective of the training by now, and iterations are so short that no
                exchange came with this one, it never answers; then a warning tells why.
        """
        asked = self.asked()
        if self._under_way is None or self._told != asked:
            self._take()
            self._launch(asked)
        self._take()

    def _launch(self, asked: list[str]) -> None:
        self._told = asked
        digest = zlib.crc32("/".join(asked).encode()) >> 1
        # The largest of all ranks' is taken. Negative are how many iterations may pass to the next exchange (the fewest do),
        # and the second digest: both come back as they were if all ranks have the same.
        flags = (*self._wishes(), -self._pace(), digest, -digest)
        self._flags.copy_(torch.tensor(flags, dtype=torch.int32))
        self._under_way = distributed.all_reduce(
            self._flags, op=distributed.ReduceOp.MAX, group=self.ranks.group, async_op=True
        )

    def _pace(self) -> int:
        now, before = time.perf_counter(), self._started
        iterations, self._since, self._started = self._since, 0, now
        if before is None or not iterations or not INTERVAL:
            return 1
        return max(1, min(_MOST_BETWEEN, int(INTERVAL * iterations / (now - before))))

    def _take(self) -> None:
        if self._under_way is None:
            return
        self._wait_for(self._under_way)
        self._under_way = None
        stop, save, cancelled, paused, rates, fewest, digest, negative = self._flags.tolist()
        if digest != -negative:
            mine = f"rank {self.ranks.rank} for {', '.join(self._told) or 'none'}"
            raise TrainingError(f"not all ranks ask for the same checkpoint at the same time, {mine}. {_TOGETHER}")
        self._every = -fewest
        if stop and not self.stop:
            self.reason = next(filter(None, self.ranks.gather(self._reason())), "")
        self.stop = self.stop or bool(stop)
        self.save = self.save or bool(save)
        self.cancelled = self.cancelled or bool(cancelled)
        self.paused, self.rates = bool(paused), bool(rates)

    def _wait_for(self, work: distributed.Work) -> None:
        if self._told and not work.is_completed():
            try:
                work.wait(timedelta(seconds=PATIENCE))
            except RuntimeError:
                if work.is_completed():  # it failed
                    raise
                log.warning(f"waiting for the other ranks to ask for this checkpoint, too. {_TOGETHER}", names=self._told)
        work.wait()


def join_ranks(
    bus: Bus, models: Mapping[str, torch.nn.Module], wishes: Callable[[], Wishes], reason: Callable[[], str], *, trains: bool
) -> Agreement | None:
    """Have the bus and a run that begins go in step with the other processes; None where there is one. A collective.

    Args:
        bus: learns which process this is.
        models: of the run.
        wishes: returns what this rank asks for.
        reason: returns why it wants a stop.
        trains: False if the run has no optimizer.

    Raises:
        ConfigurationError: ``torchrun`` started several processes, and they do not know of each other.
    """
    global _runs
    check_initialized()
    bus.set_rank(this_rank(), world_size())
    if world_size() == 1:
        return None
    _runs += 1
    agreement = Agreement(Ranks(control_group()), wishes, reason)
    if trains:
        warn_if_apart(models)
    return agreement


def warn_if_apart(models: Mapping[str, torch.nn.Module]) -> None:
    """Warn of models that have weights to train and nothing that keeps them the same on all ranks."""
    for name, model in models.items():
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if trained and not is_sharded(model) and not any(isinstance(one, DistributedDataParallel) for one in model.modules()):
            log.warning(
                "each process trains its own copy of this model, as it is neither in DistributedDataParallel nor sharded; wrap "
                "it, unless you average gradients yourself",
                model=name,
            )


def control_group() -> distributed.ProcessGroup:
    """Return the group of the default group's ranks for agreements; made once. A collective the first time."""
    return _group_for("control")


def saves_group() -> distributed.ProcessGroup:
    """Return the group that checkpoints are written with, on a thread of their own; made once. A collective then."""
    return _group_for("saves")


def _group_for(purpose: str) -> distributed.ProcessGroup:
    found = _groups.get((purpose, distributed.group.WORLD))
    if found is None:
        found = distributed.new_group(backend="gloo", timeout=_timeout())
        _groups[purpose, distributed.group.WORLD] = found
    return found


def _timeout() -> timedelta | None:
    """Return the timeout that the user gave ``init_process_group``; None where its backend does not tell."""
    # Torch has no public way to it. A group of ours with a longer one would also keep the process from ending: until a
    # collective under way has failed, torch does not let the interpreter go.
    world: Any = distributed.group.WORLD
    backend = world._get_backend(world._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


# Torch keeps them until destroy_process_group(), which has to end their threads: one that is still busy when the interpreter
# exits, and needs the GIL, would abort the process ("terminate called without an active exception").
_groups: weakref.WeakValueDictionary[tuple[str, Any], distributed.ProcessGroup] = weakref.WeakValueDictionary()
_runs = 0  # that this process has joined; the same on all ranks


def tell_failure(error: BaseException) -> None:
    """Have the other ranks know of the first error of all; if it was another's, add it to ``error``.

    They end because this process ends: its connections close, and ranks that wait for it fail. (Where a host catches the error
    and lives on, they wait for ``init_process_group(timeout=)``.) An error that is such a timeout gets a note with the ranks
    that did not answer.
    """
    mine = f"rank {this_rank()}: {type(error).__name__}: {error}"
    first, silent = mine, ""
    try:
        with _store() as store:
            first = bytes(store.compare_set(f"{_FAILURE}/{_runs}", "", mine)).decode()
            if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
                silent = _silent(store)
    except (RuntimeError, OSError):  # the process that holds the store is gone, or never had time to say why
        silent = "the process with the store of the process group (rank 0's, or torchrun)"
    if first != mine:
        error.add_note(f"another process failed first, {first}")
    if silent:
        error.add_note(
            f"{silent} did not answer: it died, was stopped, or is busy with something else; its own log tells. If it only "
            "needs longer, give init_process_group() a longer timeout="
        )
    log.error("a process failed, and ends the others", first=first)


@contextmanager
def _store() -> Iterator[Any]:
    """The default group's store, with a short timeout for the time being."""
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public way to the store it made

    store: Any = _get_default_store()  # its type stub lacks its timeout
    before = store.timeout
    store.set_timeout(_STORE_TIMEOUT)
    try:
        yield store
    finally:
        store.set_timeout(before)


def _silent(store: Any) -> str:
    """Return the ranks that have not reached their own error, in words; living ranks reach it at about the same time."""
    keys = {rank: f"{_FAILURE}/{_runs}/{rank}" for rank in range(world_size())}
    store.set(keys[this_rank()], "")
    deadline = time.monotonic() + _ANSWER
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(_ANSWER / 20)
    return ", ".join(f"rank {rank}" for rank, key in keys.items() if not store.check([key]))
