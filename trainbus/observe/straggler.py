"""Compare the ranks of a run: find the rank that holds up the others, and the part that it is slow at.

In synchronous training all ranks take equally long for an iteration, because fast ranks wait for the slow one where gradients
are averaged. So the time that counts is the time in which a rank does not wait for others. Where the run itself waits, that is
a part of its own. Other waiting hides in different parts:

- in the backward pass, if a model is wrapped in DistributedDataParallel;
- in any part of the step, if the model is sharded, or if a user's own loop measures the step as one part;
- nowhere, if the ranks are independent.

The straggler is the rank that stands out most under one of these three assumptions. These times cannot identify a rank that
is slow only where the others wait for it, such as in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainbus.eventloop.training.distributed.ranks import WAITING_FOR_RANKS
from trainbus.observe.ranks import RankCosts, RankTimes, Spent, Straggler

SIGNIFICANT: Final = 0.1
"""A rank is a straggler if the others wait this share of an iteration for it."""

_SHOWN: Final = 0.01  # share of an iteration; parts that take less on all ranks are left out

_WAITS: Final[tuple[Callable[[str, str], bool], ...]] = (
    lambda group, name: not (group in ("hook", "hand-off", "waiting") or name == "waiting for data"),
    lambda group, name: name in ("backward", WAITING_FOR_RANKS),
    lambda group, name: name == WAITING_FOR_RANKS,
)
"""The three assumptions. Each returns True for a part in which a rank may wait for others."""

Name = tuple[str, str]
"""The group of a part, and its name."""

_Array = NDArray[np.float64]


def compare(spent: Mapping[int, Spent], world_size: int) -> RankCosts | None:
    """Compare the times of ranks, by rank; None if fewer than two of them had iterations."""
    spent = {rank: one for rank, one in sorted(spent.items()) if one.iterations > 0}
    if len(spent) < 2:
        return None
    ranks, hosts = [*spent], [one.host for one in spent.values()]
    names = [*dict.fromkeys((group, name) for one in spent.values() for group, parts in one.parts.items() for name in parts)]
    # A matrix: rank 0 does this beside its training, and loops over the parts of thousands of ranks would keep the GIL from it.
    each = np.array([[one.parts.get(group, {}).get(name, 0.0) for group, name in names] for one in spent.values()])
    each = each.reshape(len(ranks), len(names)) / np.array([[one.iterations] for one in spent.values()])
    all_parts = np.column_stack([each.sum(axis=1), each])
    figures = np.stack([all_parts.min(axis=0), np.median(all_parts, axis=0), all_parts.max(axis=0)], axis=1).tolist()
    slowest = all_parts.argmax(axis=0).tolist()
    rows = [
        RankTimes(*name, low, middle, high, ranks[at], hosts[at])
        for name, (low, middle, high), at in zip([("", "iteration"), *names], figures, slowest, strict=True)
    ]
    seconds = rows[0].median
    rows[1:] = sorted((one for one in rows[1:] if one.max >= _SHOWN * seconds), key=lambda one: -one.max)
    straggler = max((_slowest(each, names, ranks, hosts, waits) for waits in _WAITS), key=lambda one: one.waited)
    return RankCosts(
        world_size=world_size,
        iterations=min(one.iterations for one in spent.values()),
        seconds=seconds,
        times=rows,
        straggler=straggler if straggler.waited >= SIGNIFICANT * seconds else None,
        missing=[rank for rank in range(world_size) if rank not in spent],
    )


def seconds_of(one: Spent, group: str, name: str) -> float:
    """Return the seconds per iteration of one part."""
    return one.parts.get(group, {}).get(name, 0.0) / one.iterations


def _slowest(
    each: _Array, names: Sequence[Name], ranks: Sequence[int], hosts: Sequence[str], waits: Callable[[str, str], bool]
) -> Straggler:
    """Return the rank that works longest outside of the parts in which it may wait, and the part that it is slow at."""
    works = [index for index, name in enumerate(names) if not waits(*name)]
    own = each[:, works]
    busy = own.sum(axis=1)
    slowest = int(busy.argmax())
    waited = float(busy[slowest] - np.median(np.delete(busy, slowest)))
    if not works:
        return Straggler(ranks[slowest], hosts[slowest], "", "iteration", 0.0, 0.0, waited)
    typical = np.median(np.delete(own, slowest, axis=0), axis=0)
    worst = int((own[slowest] - typical).argmax())
    place = *names[works[worst]], float(own[slowest, worst]), float(typical[worst])
    return Straggler(ranks[slowest], hosts[slowest], *place, waited)
