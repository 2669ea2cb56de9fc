"""The states of ranks that hold different weights, as that of one process, and back."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.training.distributed.layout import RankLayout
from trainbus.eventloop.training.saves.apart import TreePlaces, own_part

HOLDERS = {"a": 0, "b": 0, "c": 1, "d": 1}
FIRST = RankLayout(own="ab", holders=HOLDERS)
SECOND = RankLayout(own="bcd", holders=HOLDERS)


def optimizer_of(groups: list[tuple[str, dict[str, Any]]], **more: Any) -> dict[str, Any]:
    """Return a tree with the state of an optimizer, whose parameters are the letters of each group."""
    names = [*"".join(members for members, _ in groups)]
    made = [{**options, "params": [names.index(one) for one in members]} for members, options in groups]
    state = {number: {"step": f"of {name}"} for number, name in enumerate(names)}
    weights = OrderedDict((name, {"__sharded__": name}) for name in names)
    weights._metadata = OrderedDict({name: {"version": 1} for name in names})  # type: ignore[attr-defined]
    return {
        "state_dict": weights,
        "optimizer": {"adam": {"state": state, "param_groups": made}},
        "parameters": {"adam": "\n".join(names)},
        "gradients": {"adam": [f"gradient {name}" for name in names]},
        **more,
    }


def put_together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    graft = TreePlaces(SECOND, other).graft(other)
    assert graft is not None
    places = TreePlaces(FIRST, one)
    joined = places.joined(one, [graft])
    assert places.joined(joined, [graft]) == joined  # in a second directory, after the first one has failed
    return joined


def test_parameters_of_two_ranks_are_numbered_group_by_group():
    one = optimizer_of([("a", {"lr": 1.0}), ("b", {"lr": 2.0})])
    joined = put_together(one, optimizer_of([("cb", {"lr": 2.0}), ("d", {"lr": 3.0})]))
    assert joined["parameters"]["adam"] == "a\nb\nc\nd"
    groups = joined["optimizer"]["adam"]["param_groups"]
    assert groups == [{"lr": 1.0, "params": [0]}, {"lr": 2.0, "params": [1, 2]}, {"lr": 3.0, "params": [3]}]
    states = joined["optimizer"]["adam"]["state"]
    assert {number: state["step"][-1] for number, state in states.items()} == dict(enumerate("abcd"))
    assert [one[-1] for one in joined["gradients"]["adam"]] == [*"abcd"]
    assert {*joined["state_dict"]} == {*joined["state_dict"]._metadata} == {*"abcd"}


def test_each_rank_gets_its_own_part_back():
    trees = optimizer_of([("a", {"lr": 1.0}), ("b", {"lr": 2.0})]), optimizer_of([("bc", {"lr": 2.0}), ("d", {"lr": 3.0})])
    joined = put_together(*trees)
    first, second = own_part(joined, FIRST), own_part(joined, SECOND)
    assert [*first["state_dict"]] == ["a", "b"]
    assert first["optimizer"]["adam"]["param_groups"][2] == {"lr": 3.0, "params": []}
    assert second["parameters"]["adam"] == "b\nc\nd"
    assert [group["params"] for group in second["optimizer"]["adam"]["param_groups"]] == [[], [0, 1], [2]]
    assert second["optimizer"]["adam"]["state"] == trees[1]["optimizer"]["adam"]["state"]
    assert second["gradients"] == trees[1]["gradients"]


def test_names_that_optimizers_keep_themselves_stay_with_their_parameters():
    one = optimizer_of([("ab", {"param_names": ["m.a", "m.b"]})])
    joined = put_together(one, optimizer_of([("cd", {"param_names": ["m.c", "m.d"]})]))
    (group, other) = joined["optimizer"]["adam"]["param_groups"], own_part(joined, SECOND)["optimizer"]["adam"]
    assert group == [{"param_names": ["m.a", "m.b", "m.c", "m.d"], "params": [0, 1, 2, 3]}]
    assert other["param_groups"] == [{"param_names": ["m.b", "m.c", "m.d"], "params": [0, 1, 2]}]


def test_a_group_of_its_own_with_a_tensor_as_option_is_refused():
    one, other = optimizer_of([("ab", {"lr": 1.0})]), optimizer_of([("cd", {"lr": torch.tensor(1.0), "eps": 0.1})])
    with pytest.raises(CheckpointError, match="lr"):
        put_together(one, other)


def test_weights_that_came_to_a_part_of_a_model_later_are_refused():
    with pytest.raises(CheckpointError, match="'new'"):
        TreePlaces(SECOND, {}).owner(("state_dict", "new"))
    assert TreePlaces(RankLayout(), {}).owner(("state_dict", "new")) is None
    assert TreePlaces(SECOND, {}).owner(("ema_state_dict", "c")) == 1
