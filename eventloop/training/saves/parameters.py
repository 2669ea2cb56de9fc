"""Arrange an optimizer's saved state by the names of its parameters, where their order or their groups are others here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainbus.eventloop.log import get_logger

log = get_logger()


def sizes_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def has_torch_layout(state: Any) -> bool:
    """Return whether an optimizer's state is laid out as ``torch.optim.Optimizer.state_dict`` does it."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return (
        isinstance(groups, list)
        and isinstance(state.get("state"), Mapping)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    )


def arranged(state: Any, saved: str, own: str, sizes: Sequence[int]) -> Any:
    """Return an optimizer's saved state in the order and the groups of the optimizer here, if it has the same parameters.

    Where parameters of one group here had different options, or the state has a layout of its own, it stays as it is, and the
    optimizer decides.

    Args:
        state: its ``state_dict()``, in which torch numbers the parameters.
        saved: the names of these parameters, one a line.
        own: the names of those of the optimizer here.
        sizes: the sizes of the groups here.
    """
    if not saved or not has_torch_layout(state):
        return state
    before, after = saved.split("\n"), own.split("\n")
    options = [group for group in state["param_groups"] for _ in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    same = before == after and [len(group["params"]) for group in state["param_groups"]] == [*sizes]
    if same or sorted(before) != sorted(after) or len({*before}) < len(before) or numbers != [*range(len(before))]:
        return state
    number = {name: index for index, name in enumerate(before)}
    groups: list[dict[str, Any]] = []
    for size in sizes:
        begin = sum(len(group["params"]) for group in groups)
        members = range(begin, begin + size)
        theirs = [options_of(options[number[after[member]]]) for member in members]
        if any(one != theirs[0] for one in theirs):
            return state
        groups.append({**(theirs[0] if theirs else {}), "params": [*members]})
    moved = {index: state["state"][number[name]] for index, name in enumerate(after) if number[name] in state["state"]}
    rest = {key: value for key, value in state["state"].items() if key not in numbers}
    log.info("arranged the optimizer's state by the names of its parameters, whose order or groups are others here")
    return {**state, "state": moved | rest, "param_groups": groups}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
