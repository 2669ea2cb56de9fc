"""The part of a checkpoint that lets the lines of a resumed run equal those of an uninterrupted one.

The lines depend on smoothing windows, which only the thread of the logger changes, and on iterations that wait in its lane. A
save takes both. It waits neither for that thread nor for a device: scalars that are still on one are saved as tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from trainbus.hooks.writers.base import Where

_FEWEST = 64  # values of a tensor in a checkpoint

_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder(Where).decode

Group = tuple[torch.dtype, torch.device]

Late = Sequence[tuple[list[str], torch.Tensor]]
"""Scalars that are still on a device: names, and their values in one tensor."""


class Waiting(NamedTuple):
    """An iteration that waits for the logger: its scalars, its position, and the scalars that are still on a device."""

    outputs: Mapping[str, Any]
    where: Where
    late: Late = ()


class Unwritten:
    """Pack what the lines of a logger depend on."""

    def __init__(self) -> None:
        self._sizes: dict[Group, int] = {}

    def pack(
        self, windows: Mapping[str, Any] | None, skipped: int, waiting: Sequence[Waiting], reach: int | None
    ) -> dict[str, Any]:
        """Return a tree for a checkpoint: the state of a ``Fanout``, the iterations since, and how many of them were skipped.

        A line depends on ``reach`` iterations at most; None: on all.
        """
        needed = waiting if reach is None else waiting[max(0, len(waiting) - reach) :]
        stacks: dict[Group, list[torch.Tensor]] = defaultdict(list)
        groups, rows = [*self._sizes], []
        for outputs, where, late in needed:
            names = []
            for own, values in late:
                group = values.dtype, values.device
                stacks[group].append(values)
                groups += [group] * (group not in groups)
                names.append((groups.index(group), own))
            numbers = {name: value for name, value in outputs.items() if isinstance(value, int | float)}
            rows.append((numbers, _pack(where), names))
        late_values = [self._joined(group, stacks[group]) for group in groups]
        return {"windows": windows, "skipped": skipped + len(waiting) - len(needed), "waiting": rows, "late": late_values}

    def _joined(self, group: Group, stacks: list[torch.Tensor]) -> torch.Tensor:
        # Of one size in almost all saves, because a tensor of another size would need new memory for the whole copy.
        used = sum(map(len, stacks))
        size = self._sizes.get(group, _FEWEST)
        while size < used:
            size *= 2
        self._sizes[group] = size
        with torch.no_grad():
            joined = torch.cat([*stacks, torch.zeros(size - used, dtype=group[0], device=group[1])])
        return joined.as_subclass(torch.Tensor)


def read(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of :meth:`Unwritten.pack` from a checkpoint with numbers in place of its tensors."""
    late = [iter(values.tolist()) for values in state["late"]]
    rows = []
    for numbers, where, names in state["waiting"]:
        arrived = {name: next(late[group]) for group, own in names for name in own}
        rows.append(({**numbers, **arrived}, where))
    return {**state, "waiting": rows}


def parts(state: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, int, list[Waiting]]:
    """Return the windows, skipped iterations and waiting iterations of a state of :func:`read`; None for a new run."""
    if state is None:
        return None, 0, []
    waiting = [Waiting(numbers, _unpack(where)) for numbers, where in state["waiting"]]
    return state["windows"], state["skipped"], waiting
