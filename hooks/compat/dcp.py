"""Layouts of checkpoints that torch's distributed engines write: torchtitan, FSDP2 and Accelerate.

All name the parameters in the optimizer's state. ``torch.distributed.checkpoint.state_dict`` keeps it nested, with a list of
groups. torchtitan has flat keys (``optimizer.param_groups.NAME.lr``), and the weights beside it, not below ``model``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from eventloop.checkpoint import (
    AnyPath,
    Contents,
    ForeignFormat,
    is_dcp,
    is_weights,
    list_directories,
    open_dcp,
    open_safetensors,
)
from eventloop.errors import CheckpointError
from eventloop.training import imported_state

OTHERS: Final = "dcp"
"""Key of a checkpoint with the entries that no run resumes from, such as torchtitan's ``dataloader``."""
_WEIGHTS: Final = ("model", "state_dict")
_OPTIMIZER: Final = ("optimizer", "optim")
_ACCELERATE: Final = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")


def open_folder(directory: AnyPath) -> Contents:
    """Open a folder with a checkpoint of DCP, Accelerate or Hugging Face, without running anything of it.

    Raises:
        CheckpointDamagedError: a file is damaged.
        CheckpointError: the folder has no such checkpoint, or a file names code.
    """
    if is_dcp(directory):
        return open_dcp(directory)
    inner = [one for one in list_directories(directory) if is_dcp(one)]
    parts = [one for one in inner if _ACCELERATE.fullmatch(one.name)]
    if several := [one.name for one in parts if not one.name.endswith("_0")]:
        raise CheckpointError(
            f"{directory} has several models or optimizers ({', '.join(several)}): import each folder by itself"
        )
    if inner and not parts:
        raise CheckpointError(f"{directory} has several checkpoints; name one: {', '.join(sorted(one.name for one in inner))}")
    return open_dcp(*parts) if parts else open_safetensors(directory)


def is_by_name(tree: Any) -> bool:
    """Return True for a state with an optimizer whose parameters are named."""
    optimizer = _entry(tree, _OPTIMIZER)
    if optimizer is None or "param_groups" not in optimizer:
        return optimizer is not None and any(str(key).startswith("param_groups.") for key in optimizer)
    names = [name for group in optimizer["param_groups"] for name in group.get("params", ())]
    return bool(names) and all(isinstance(name, str) for name in names)


def from_dcp(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state with a model's weights, and perhaps its optimizer's state, to the state of a run.

    - A run resumes with the weights, the optimizer, and the count of iterations: torchtitan's ``train_state``, or the most
      steps of a parameter. Each iteration counts as an update.
    - There are no random states and no position in the data, so the run resumes at the beginning of an epoch.
    - Other entries are kept under ``"dcp"``.
    """
    tree = _inner(tree)
    weights = _entry(tree, _WEIGHTS)
    rest = {key: value for key, value in tree.items() if key not in (*_WEIGHTS, *_OPTIMIZER)}
    if weights is None:
        weights = {key: value for key, value in tree.items() if isinstance(value, torch.Tensor)}
        rest = {key: value for key, value in rest.items() if key not in weights}
    saved = _entry(tree, _OPTIMIZER)
    optimizer, names = ({}, []) if saved is None else _by_number(_grouped(saved, weights))
    trained = tree.get("train_state")
    steps = _count(trained.get("step") if isinstance(trained, Mapping) else tree.get("step"))
    steps = steps or max((_count(one.get("step")) for one in optimizer.get("state", {}).values()), default=0)
    state = imported_state(weights, iter=steps)
    if optimizer:
        state["optimizer"] = {"optimizer": optimizer}
        state["parameters"] = {"optimizer": "\n".join(names)} if names else {}
    return {**state, OTHERS: rest} if rest else state


def converted(tree: Any) -> tuple[Any, dict[str, str]]:
    """Convert what ``open_folder`` found; return it with notes for the user."""
    inner = _inner(tree)
    if not isinstance(inner, Mapping) or not (_entry(inner, _WEIGHTS) or is_weights(inner)):
        return tree, {
            "from": "a folder without a model's weights, unchanged",
            "resumes": "nothing; eventloop.checkpoint.load reads it",
        }
    state = from_dcp(tree)
    others = {"kept": f"under {OTHERS!r}: {', '.join(state[OTHERS])}"} if OTHERS in state else {}
    if "optimizer" not in state:
        plain = {key: value for key, value in state.items() if key in ("state_dict", OTHERS)}
        return plain, {"from": "a folder with weights", "resumes": "nothing but the weights", **others}
    kind = "torchtitan" if "train_state" in inner else "torch.distributed.checkpoint"
    return state, {
        "from": kind,
        "resumes": f"weights; optimizer; iteration {state['progress']['iter']}",
        "afresh": "schedules, random states, the position in the data (the beginning of an epoch)",
        **others,
    }


def _inner(tree: Any) -> Any:
    """Return the state inside of dicts with one entry, such as ``{"app": state}``."""
    while isinstance(tree, Mapping) and len(tree) == 1:
        ((key, value),) = tree.items()
        if key in (*_WEIGHTS, *_OPTIMIZER) or not isinstance(value, Mapping):
            break
        tree = value
    return tree


def _entry(tree: Any, keys: Sequence[str]) -> Mapping[str, Any] | None:
    found = (tree[key] for key in keys if isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping))
    return next(found, None)


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return int(value) if isinstance(value, int | float) and value >= 0 else 0


# ----------------------------------------------------------------------------------------------------------- optimizers


def _grouped(saved: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with a list of groups. Flat keys have none: neighbours with equal options become one."""
    if "param_groups" in saved:
        return {"state": saved.get("state", {}), "param_groups": saved["param_groups"]}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        part, _, rest = key.partition(".")
        if part not in ("state", "param_groups"):
            raise CheckpointError(f"{key!r} is neither the state nor an option of a parameter")
        name, inner = _split(rest, weights)
        one = (state if part == "state" else options).setdefault(name, {})
        for outer in inner[:-1]:
            one = one.setdefault(outer, {})
        one[inner[-1]] = value
    groups: list[dict[str, Any]] = []
    for name, own in options.items():
        if not groups or {key: value for key, value in groups[-1].items() if key != "params"} != own:
            groups.append({**own, "params": []})
        groups[-1]["params"].append(name)
    return {"state": state, "param_groups": groups}


def _split(key: str, weights: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Divide ``layers.0.weight.exp_avg`` into the name of a parameter and the rest."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:end])) in weights:
            return name, parts[end:]
    return ".".join(parts[:-1]), parts[-1:]


def _by_number(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an optimizer's state as torch has it, with numbers for parameters, and their names (none if it has numbers)."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    numbers = {str(name): number for number, name in enumerate(names)}
    if strange := [name for name in saved["state"] if str(name) not in numbers]:
        raise CheckpointError(f"the optimizer has a state of {strange[0]!r}, which is in none of its groups")
    groups, begin = [], 0
    for group in saved["param_groups"]:
        groups.append({**group, "params": [*range(begin, begin + len(group["params"]))]})
        begin += len(group["params"])
    state = {numbers[str(name)]: one for name, one in saved["state"].items()}
    named = [name for name in names if isinstance(name, str)]
    return {"state": dict(sorted(state.items())), "param_groups": groups}, named


DCP_CHECKPOINTS: Final = ForeignFormat(recognises=is_by_name, convert=converted)
