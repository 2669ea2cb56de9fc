"""The saved state of ranks that hold different weights (see ``RankLayout``) as that of one process, and back.

Names are those of the whole model, so weights and averages of all ranks make up one mapping. An optimizer numbers its
parameters, and those of another rank have the same numbers: they are numbered anew, group by group. So a checkpoint of
pipeline stages can be resumed on another number of stages, or on one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch

from trainbus.eventloop.checkpoint.pieces import Keys, mapped
from trainbus.eventloop.checkpoint.places import Places
from trainbus.eventloop.checkpoint.shards import MARK, marks_in
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError
from trainbus.eventloop.privates import metadata_of, with_metadata
from trainbus.eventloop.training.distributed.layout import RankLayout
from trainbus.eventloop.training.saves.parameters import has_torch_layout, options_of
from trainbus.eventloop.training.schema import Tree

_NUMBERED: Final = ("optimizer", "parameters", "gradients")
"""Keys of the tree that number parameters, and the one with their names."""
_LEFT = ...
"""In a graft: a tensor that rank 0 has."""


class TreePlaces(Places):
    """The places of tensors in the state of a run."""

    def __init__(self, layout: RankLayout, state: Tree) -> None:
        self._layout = layout
        self._parameters = _names_in(state)

    def owner(self, keys: Keys) -> int | None:
        """Return the first rank that holds the tensor at ``keys``; None if only its mesh tells."""
        if not self._layout.holders:
            return None
        owner = self._layout.holders.get(name := self._name(keys))
        if owner is None and self._layout.apart and keys[0] == "state_dict":
            raise CheckpointValueError(
                f"{name!r} is new in a model of which each rank has a part, and the other ranks do not know who holds it: "
                "begin another run when the model has changed"
            )
        return owner

    def named(self, keys: Keys) -> Keys:
        """Return a path with the name of a parameter in place of its number, which is another one on each rank."""
        if self._layout.apart and (at := self._number_in(keys)) and (name := self._name(keys)):
            return (*keys[:at], name, *keys[at + 1 :])
        return keys

    def graft(self, tree: Tree) -> Tree | None:
        """Return what the tree of rank 0 may lack of this one, without tensors; None if it lacks nothing."""
        if not self._layout.apart:
            return None
        wanted = {key: value for key, value in tree.items() if key in _NUMBERED or any(marks_in(value))}
        found: Tree = mapped(wanted, lambda value: isinstance(value, torch.Tensor), lambda keys, value: _LEFT)
        return found

    def joined(self, tree: Tree, grafts: Sequence[Tree]) -> Tree:
        """Return the tree of rank 0 with what it lacks of others; its own tensors keep their order."""
        for graft in grafts:
            named = {key: _united(tree.get(key, value), value) for key, value in graft.items() if key not in _NUMBERED}
            tree = {**tree, **named, **_numbered_together(tree, graft)}
        return tree

    def _name(self, keys: Keys) -> str:
        at = self._number_in(keys)
        if not at:
            return ".".join(map(str, keys[1:]))
        names, number = self._parameters.get(str(keys[1]), []), keys[at]
        return names[number] if isinstance(number, int) and number < len(names) else ""

    @staticmethod
    def _number_in(keys: Keys) -> int:
        """Return the place of a parameter's number in a path; 0 without one."""
        if keys[0] == "optimizer" and keys[2:3] == ("state",) and len(keys) > 3:
            return 3
        return 2 if keys[0] == "gradients" and len(keys) > 2 else 0


def own_part(tree: Tree, layout: RankLayout) -> Tree:
    """Return the state of all ranks without the weights that this rank lacks and another one holds."""
    if not layout.apart:
        return tree
    made = {key: value if key in _NUMBERED else _without(value, layout.is_elsewhere) for key, value in tree.items()}
    for name, names in _names_in(tree).items():
        kept = [one for one in names if not layout.is_elsewhere(one)]
        state = tree.get("optimizer", {}).get(name)
        if kept != names and _counts_up(state, names):
            groups = [[one for one in group if one in {*kept}] for group in _grouped(state, names)]
            made["optimizer"] = {**made["optimizer"], name: _numbered(groups, state["param_groups"], [(state, names)])}
            made["parameters"] = {**made["parameters"], name: "\n".join(chain.from_iterable(groups))}
            if name in tree.get("gradients", {}):
                found = dict(zip(names, tree["gradients"][name], strict=False))
                made["gradients"] = {**made["gradients"], name: [found.get(one) for one in chain.from_iterable(groups)]}
    return made


def _names_in(tree: Tree) -> dict[str, list[str]]:
    return {name: lines.split("\n") for name, lines in tree.get("parameters", {}).items()}


def _counts_up(state: Any, names: Sequence[str]) -> bool:
    """Return whether the state of an optimizer numbers the parameters of these names, one after the other."""
    return has_torch_layout(state) and [number for group in state["param_groups"] for number in group["params"]] == [
        *range(len(names))
    ]


def _grouped(state: Any, names: Sequence[str]) -> list[list[str]]:
    return [[names[number] for number in group["params"]] for group in state["param_groups"]]


def _numbered_together(tree: Tree, graft: Tree) -> Tree:
    """Return what numbers parameters, for those of both trees."""
    ours, theirs = _names_in(tree), _names_in(graft)
    states, lines, gradients = (dict(tree.get(key, {})) for key in _NUMBERED)
    for name in ours.keys() & theirs.keys() & states.keys():
        own, other = states[name], graft["optimizer"][name]
        groups, options, known = _grouped(own, ours[name]), [*own["param_groups"]], {*ours[name]}
        for at, members in enumerate(_grouped(other, theirs[name])):
            if more := [one for one in members if one not in known]:
                place = _place(other["param_groups"][at], at, options)
                if place == len(options):
                    options.append(other["param_groups"][at])
                    groups.append([])
                groups[place] += more
        states[name] = _numbered(groups, options, [(own, ours[name]), (other, theirs[name])])
        lines[name] = "\n".join(order := [*chain.from_iterable(groups)])
        if name in gradients or name in graft.get("gradients", {}):
            found = dict(zip(theirs[name], graft["gradients"].get(name, ()), strict=False))
            found |= zip(ours[name], gradients.get(name, ()), strict=False)
            gradients[name] = [found.get(one) for one in order]
    return {key: value for key, value in zip(_NUMBERED, (states, lines, gradients), strict=True) if key in tree}


def _place(group: Mapping[str, Any], at: int, options: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of a group among others with its options, at best ``at``; their number if none has these."""
    own, others = _numbers(group), [*map(_numbers, options)]
    if at < len(others) and own == others[at]:
        return at
    return others.index(own) if own in others else len(others)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group without tensors, which ``check_alike`` has compared."""
    compared = (torch.Tensor, type(_LEFT))
    return {key: None if isinstance(value, compared) else value for key, value in options_of(group).items()}


def _numbered(
    groups: Sequence[Sequence[str]], options: Sequence[Mapping[str, Any]], parts: Sequence[tuple[Any, Sequence[str]]]
) -> dict[str, Any]:
    """Return the state of an optimizer for parameters in ``groups``, from states with the names of theirs; the first counts."""
    number = {name: index for index, name in enumerate(chain.from_iterable(groups))}
    state: dict[Any, Any] = {}
    raw: dict[str, str] = {}
    for one, names in parts:
        for key, value in one["state"].items():
            where = key if not isinstance(key, int) else number.get(names[key]) if key < len(names) else None
            if where is not None:
                state.setdefault(where, value)
        for group in one["param_groups"]:
            raw |= zip((names[index] for index in group["params"]), group.get("param_names", ()), strict=False)
    made = [_group(group, members, number, raw) for group, members in zip(options, groups, strict=True)]
    return {**parts[0][0], "state": state, "param_groups": made}


def _group(
    options: Mapping[str, Any], members: Sequence[str], number: Mapping[str, int], raw: Mapping[str, str]
) -> dict[str, Any]:
    """Return a group with these members; some optimizers keep their names in the model, ``raw``, in it, too."""
    if left := [key for key, value in options.items() if value is _LEFT]:
        raise CheckpointError(
            f"a group of parameters has a tensor as {', '.join(left)}, and rank 0 has no group with its other options: make it "
            "a number, or give rank 0 such a group"
        )
    named = {"param_names": [raw[name] for name in members if name in raw]} if "param_names" in options else {}
    return {**options, **named, "params": [number[name] for name in members]}


def _united(one: Any, other: Any) -> Any:
    """Return a value with what it lacks of another one; its own parts come first."""
    if isinstance(one, dict) and isinstance(other, dict) and MARK not in one:
        made = copy.copy(one)
        more = {key: value for key, value in other.items() if key not in one and value is not _LEFT}
        for key, value in ({key: _united(value, other.get(key, _LEFT)) for key, value in one.items()} | more).items():
            made[key] = value
        metadata = metadata_of(one), metadata_of(other)
        return made if None in metadata else with_metadata(made, {**metadata[1], **metadata[0]})  # type: ignore[dict-item]
    if type(one) is list and type(other) is list and len(one) == len(other):
        return [_united(*pair) for pair in zip(one, other, strict=True)]
    return one


def _without(value: Any, dropped: Callable[[str], bool], above: Iterable[str] = ()) -> Any:
    """Return a mapping of names, or mappings of them by model, without some names."""
    if not isinstance(value, dict) or MARK in value or len(path := [*above]) > 1:
        return value
    gone = [key for key in value if dropped(".".join([*path, str(key)]))]
    inner = {key: _without(each, dropped, [*path, str(key)]) for key, each in value.items() if key not in gone}
    if not gone and all(inner[key] is value[key] for key in inner):
        return value
    made = copy.copy(value)
    for key in gone:
        del made[key]
    for key, each in inner.items():
        made[key] = each
    return made
