"""Join the ranks of a run, and report the first failure on all of them."""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, Final

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import is_sharded
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.platform import command_of_parent
from trainbus.eventloop.privates import default_store, default_timeout, tcp_store
from trainbus.eventloop.training.coordinator import Coordinator, Requests
from trainbus.eventloop.training.distributed.collectives import Collectives
from trainbus.eventloop.training.distributed.layout import find_layout
from trainbus.eventloop.training.distributed.mailbox import missing_of
from trainbus.eventloop.user_errors import add_note, described, notes_of
from trainbus.eventloop.world import is_joined, this_rank, world_size

_FAILURE: Final = "trainbus/failure"
_OTHER_FIRST: Final = "another process failed first"
_STORE_TIMEOUT: Final = 5.0  # seconds
_ANSWER: Final = 2.0  # seconds within which ranks that waited for the same rank fail
_TIMED_OUT: Final = re.compile(r"time(d |-)?out", re.IGNORECASE)
WAITING_FOR_RANKS: Final = "waiting for the other ranks"
"""The part of the costs of a run in which a rank waits for messages of the others."""

log = get_logger()


def is_parallel(model: torch.nn.Module) -> bool:
    """Return True for a model that is wrapped or sharded, or has nothing to train."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return not trains or is_sharded(model) or isinstance(model, DistributedDataParallel)


def join_ranks(
    bus: Bus,
    models: Mapping[str, torch.nn.Module],
    own: Requests,
    *,
    trains: bool,
    group: int | None = None,
    data_mesh: Any = None,
) -> Coordinator:
    """Join a new run with the runs of the other ranks, and set the rank of the bus; return what they agree by. A collective.

    ``own`` has the requests of this rank. ``trains`` is False for a run without an optimizer; else warn about models whose
    weights are not synchronised between ranks, unless ranks hold different ones. ``group`` is the number of processes in this
    replica group, if there are such. ``data_mesh`` is that of :func:`~.layout.data_rank`.

    Raises:
        ConfigurationError: ``torchrun`` started this process, but ``torch.distributed`` is not initialised. In a replica group
            only several processes need it.
    """
    global _runs
    if group is not None and group != world_size():
        raise ConfigurationError(
            f"the replica group has {group} processes, but torch.distributed has {world_size()}: call "
            "torch.distributed.init_process_group() before the run, for the processes of one group"
        )
    if group == 1:
        bus.internal.set_rank(0, 1)
        return Coordinator(own)
    if distributed.is_available() and distributed.is_torchelastic_launched() and not is_joined():
        raise ConfigurationError(
            "torchrun started this process, but torch.distributed is not initialised, so every process would train alone and "
            "write the same files: call torch.distributed.init_process_group() before the run, and wrap the model in "
            "DistributedDataParallel (or fully_shard it)"
        )
    bus.internal.set_rank(this_rank(), world_size())
    if not this_rank() and (restarts := _elastic()):
        log.warning(
            "processes that torchrun starts again may hang, and a machine that joins later ends them all after 60 s. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all machines",
            id="restarts-may-hang",
            **restarts,
        )
    if world_size() == 1:
        return Coordinator(own)
    _runs += 1
    try:
        ranks = Collectives(own_group("control"), own, partial(bus.span, WAITING_FOR_RANKS), run=_runs)
        ranks.layout = find_layout(models, ranks.distinct, data_mesh)
    except BaseException as error:
        share_failure(error)  # the run shares the errors that come once it has its ranks
        raise
    if ranks.layout.problem and not ranks.rank:
        log.warning(
            f"samplers are not checked, and each process counts as another one in the means of validations: "
            f"{ranks.layout.problem}",
            id="data-ranks-unknown",
        )
    for name, model in () if ranks.layout.apart else models.items():
        if trains and not (is_parallel(model) or any(isinstance(part, DistributedDataParallel) for part in model.modules())):
            log.warning(
                "each process trains its own copy of this model: wrap it in DistributedDataParallel or shard it, unless you "
                "average gradients yourself",
                id="model-not-parallel",
                model=name,
            )
    return ranks


def _elastic() -> dict[str, str]:
    """Return torchrun's ``--nnodes`` if it is a range, and ``--max-restarts`` if it is not 0, where torch cannot do that well.

    Agents share one store by default (torch 2.13). In later rounds, rank 0 does not tell the address of its store
    (``DynamicRendezvousHandler.next_rendezvous``), so machines that join wait for it. And processes that are started again use
    the same keys (``_create_c10d_store``), so that gloo may connect to addresses of the processes before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    given = os.environ.get("PET_NNODES", "")  # torchrun's own variable
    if found := re.search(r"--nnodes[= ](\S+)", command_of_parent()):  # the agent's, on Linux
        given = found[1]
    fewest, _, most = given.partition(":")
    grows = fewest.isdecimal() and most.isdecimal() and int(most) > max(int(fewest), 1)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return ({"nnodes": given} if grows else {}) | ({"max_restarts": restarts} if restarts != "0" else {})


def own_group(purpose: str) -> distributed.ProcessGroup:
    """Return trainbus's process group for a purpose, such as agreements, or a thread that writes. First call: a collective."""
    found = _groups.get((purpose, distributed.group.WORLD))
    if found is None:
        # With the timeout of init_process_group (None if the backend does not expose it): a longer one delays the exit of
        # the interpreter, which waits until a collective under way has failed.
        found = distributed.new_group(backend="gloo", timeout=default_timeout())
        wait_until_connected(found)
        _groups[purpose, distributed.group.WORLD] = found
    return found


def wait_until_connected(group: distributed.ProcessGroup | None = None) -> None:
    """Wait until all ranks have connected; ``group`` is the default process group if None. A collective.

    A gloo group exists for a rank once that rank has connected. If it then raised and ended, ranks that still connect would
    fail with "Connection closed by peer" in place of its error.
    """
    distributed.all_reduce(torch.zeros(1), group=group)


# Weak: only torch may keep the groups, so that destroy_process_group() ends their threads. A thread that needs the GIL while
# the interpreter exits would abort the process ("terminate called without an active exception", python/cpython#87135).
_groups: weakref.WeakValueDictionary[tuple[str, Any], distributed.ProcessGroup] = weakref.WeakValueDictionary()
_runs = 0  # number of runs that this process has joined; equal on all ranks


def share_failure(error: BaseException) -> None:
    """Share the first error of all ranks; add it to ``error`` as a note if another rank failed first.

    The other ranks fail when this process ends and its connections close. (If a host catches the error, they wait for
    ``init_process_group(timeout=)``.) A timeout error gets a note with the ranks that did not answer.
    """
    mine = f"rank {this_rank()}: {described(error)}"
    timed_out = isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)) is not None
    found: list[tuple[str, str]] = []
    # On a thread: a machine that vanished sends no reset, so that a call to a store on it waits for a quarter of an hour,
    # whatever the timeout of the store (the kernel's tcp_retries2).
    asks = Thread(target=lambda: found.append(_ask_store(mine, timed_out=timed_out)), name="trainbus failure", daemon=True)
    asks.start()
    asks.join(_STORE_TIMEOUT + 2 * _ANSWER)
    first, silent = found[0] if found else (mine, _who_has_the_store())
    if first != mine:
        add_note(error, f"{_OTHER_FIRST}: {first}")
    if silent:
        add_note(
            error,
            f"{silent} did not answer: it ended, was stopped, or is busy; see its own log. If it only needs more time, give "
            "init_process_group() a longer timeout=",
        )
    log.error("a process failed and ends the others", id="rank-failed", first=first)


def _ask_store(mine: str, *, timed_out: bool) -> tuple[str, str]:
    """Return the first error of all ranks, and who did not answer: ranks after a timeout, or the process with the store."""
    store = default_store()
    before = store.timeout
    store.set_timeout(timedelta(seconds=_STORE_TIMEOUT))
    try:
        first = bytes(store.compare_set(f"{_FAILURE}/{_runs}", "", mine)).decode()
        return first, _silent(store) if timed_out else ""
    except (RuntimeError, OSError):  # the process that holds the store has ended
        return mine, _who_has_the_store()
    finally:
        store.set_timeout(before)


def _who_has_the_store() -> str:
    who = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    tcp = tcp_store(default_store())
    return f"{who} (the process with the store of the process group{f', {tcp.host}:{tcp.port}' if tcp else ''})"


def failed_first(error: BaseException) -> bool:
    """Return False if :func:`share_failure` found that another rank had failed before this one."""
    return not any(note.startswith(_OTHER_FIRST) for note in notes_of(error))


def record_failure(error: BaseException) -> None:
    """Write an error that is being handled to the error file of ``torchrun``, if that started this process.

    The summary of ``torchrun``'s agent, and what reads it, then have its message and traceback.
    """
    if distributed.is_available() and distributed.is_torchelastic_launched():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            get_error_handler().record_exception(error)
        except OSError as failure:  # it must not take the place of the error
            log.warning(
                "the error could not be written to the error file of torchrun", id="error-file-not-written", error=str(failure)
            )


def _silent(store: Any) -> str:
    """Return the ranks that reported no error, as text; living ranks report one at about the same time."""
    place, me = f"{_FAILURE}/{_runs}", str(this_rank())
    store.set(f"{place}/{me}", "")
    # One rank looks for the others: if all did, the store would get as many requests as the square of their number.
    looks = bytes(store.compare_set(f"{place}/looks", "", me)).decode() == me
    deadline = time.monotonic() + (_ANSWER if looks else 2 * _ANSWER)
    if not looks:
        while not (told := store.check([f"{place}/silent"])) and time.monotonic() < deadline:
            time.sleep(_ANSWER / 20)
        return bytes(store.get(f"{place}/silent")).decode() if told else ""
    keys = {f"{place}/{rank}": rank for rank in range(world_size())}
    while (missing := missing_of(store.check, [*keys])) and time.monotonic() < deadline:
        time.sleep(_ANSWER / 20)
    silent = ", ".join(f"rank {keys[key]}" for key in missing)
    store.set(f"{place}/silent", silent)
    return silent
