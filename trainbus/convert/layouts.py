"""Layouts of checkpoints that torch's distributed engines write: torchtitan, FSDP2 and Accelerate.

All name the parameters in the optimizer's state. ``torch.distributed.checkpoint.state_dict`` keeps it nested, with a list of
groups. torchtitan has flat keys (``optimizer.param_groups.NAME.lr``), and the weights beside it, not below ``model``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from trainbus.convert.contents import Contents
from trainbus.convert.dcp import is_dcp, open_dcp
from trainbus.convert.safetensors_folder import open_safetensors
from trainbus.eventloop import get_logger
from trainbus.eventloop.checkpoint import AnyPath, is_weights, list_directories
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.training import ForeignFormat, imported_state, register_format

log = get_logger()

OTHERS: Final = "dcp"
"""Key of a checkpoint with the entries that no run resumes from, such as torchtitan's ``dataloader``."""
_WEIGHTS: Final = ("model", "state_dict")
_OPTIMIZER: Final = ("optimizer", "optim")
_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""What torch's own modules have in their ``state_dict`` beside parameters."""
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
    groups = optimizer["param_groups"]
    names = [name for group in groups for name in group["params"]] if _are_groups(groups) else []
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
    optimizers = {owner: _by_number(_grouped(saved, weights)) for owner, saved in _optimizers(tree).items()}
    trained = tree.get("train_state")
    steps = _count(trained.get("step") if isinstance(trained, Mapping) else tree.get("step"))
    counted = (one.get("step") for saved, _ in optimizers.values() for one in saved["state"].values())
    steps = steps or max(map(_count, counted), default=0)
    state = imported_state(weights, iter=steps)
    if optimizers:
        state["optimizer"] = {owner: saved for owner, (saved, _) in optimizers.items()}
        state["parameters"] = {owner: "\n".join(names) for owner, (_, names) in optimizers.items() if names}
    return {**state, OTHERS: rest} if rest else state


def convert_folder(tree: Any) -> tuple[Any, dict[str, str]]:
    """Convert what ``open_folder`` found; return it with notes for the user."""
    inner = _inner(tree)
    if not isinstance(inner, Mapping) or not (_entry(inner, _WEIGHTS) or is_weights(inner)):
        return tree, {
            "from": "a folder without a model's weights, unchanged",
            "resumes": "nothing; trainbus.eventloop.checkpoint.load reads it",
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
    return int(value) if isinstance(value, int | float) and 0 <= value < math.inf else 0


# ----------------------------------------------------------------------------------------------------------- optimizers


def _optimizers(tree: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the states of the optimizers by name; one alone has the name that a run gives it."""
    saved = _entry(tree, _OPTIMIZER) or {}
    several = bool(saved) and all(isinstance(one, Mapping) and "param_groups" in one for one in saved.values())
    return saved if several or not saved else {"optimizer": saved}


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in groups
    )


def _grouped(saved: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with a list of groups. Flat keys have none: neighbours with equal options become one."""
    if "param_groups" in saved:
        own, given = saved.get("state", {}), saved["param_groups"]
        if not (isinstance(own, Mapping) and all(isinstance(one, Mapping) for one in own.values()) and _are_groups(given)):
            raise CheckpointError("the optimizer's 'state' and 'param_groups' are not laid out as torch's optimizers have them")
        return {"state": own, "param_groups": given}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        part, _, rest = str(key).partition(".")
        if part not in ("state", "param_groups"):
            raise CheckpointError(f"{key!r} is neither the state nor an option of a parameter")
        name, inner = _split(rest, weights)
        one = (state if part == "state" else options).setdefault(name, {})
        for outer in inner[:-1]:
            one = one.setdefault(outer, {})
            if type(one) is not dict:
                raise CheckpointError(f"{key!r} leads through another value of the optimizer")
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


# --------------------------------------------------------------------------------------------------------------- export


def to_dcp(tree: Any, *, key: str = "state_dict", torchtitan: bool = False) -> dict[str, Any]:
    """Return the weights and the optimizers of a checkpoint as torch's distributed engines have them, by parameter name.

    They are ``{"model": …, "optimizer": {"state": …, "param_groups": […]}}``, as ``get_state_dict`` of
    ``torch.distributed.checkpoint.state_dict`` returns them (the state of several optimizers together), or torchtitan's keys.

    Args:
        tree: a checkpoint.
        key: its key of the weights.
        torchtitan: weights at the top, flat keys in the optimizer, ``train_state`` and ``lr_scheduler`` (of a ``LambdaLR``).

    Raises:
        CheckpointError: the checkpoint has no weights, or no names of the optimizer's parameters.
    """
    weights = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"the checkpoint has no weights ({key})")
    others = dict(tree.get(OTHERS, {}))
    named = _by_name(tree, weights)
    if not torchtitan:
        return {"model": weights, **({"optimizer": named} if named else {}), **others}
    if any(not isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(
            "torchtitan has one model, whose weights are tensors; export this checkpoint without --torchtitan"
        )
    if not named:
        return {**weights, **others}
    steps = tree.get("progress", {}).get("update", 0)
    states = {"train_state": {"step": steps, "ntokens_seen": 0}, "lr_scheduler": {"last_epoch": steps}}
    return {**weights, "optimizer": _flat(named), **states, **others}


def _by_name(tree: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    together: dict[str, Any] = {"state": {}, "param_groups": []}
    for owner, saved in tree.get("optimizer", {}).items():
        names = _names_of(saved, tree.get("parameters", {}).get(owner, ""), weights)
        if not all(names):
            raise CheckpointError(f"the optimizer {owner!r} has a parameter that is in no model; --weights exports the weights")
        together["state"] |= {names[number]: one for number, one in saved["state"].items()}
        for group in saved["param_groups"]:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            together["param_groups"].append({**options, "params": [names[number] for number in group["params"]]})
    return together if together["param_groups"] else {}


def _names_of(saved: Mapping[str, Any], known: str, weights: Mapping[str, Any]) -> list[str]:
    """Return the names of an optimizer's parameters. A file without them has those of the weights, if the shapes fit."""
    groups = saved["param_groups"]
    given = [name for group in groups for name in group.get("param_names", ())]
    count = sum(len(group.get("params", ())) for group in groups)
    for names in (known.split("\n"), given):
        if any(names) and len(names) == count:
            return names
    tensors = {id(value): key for key, value in reversed([*weights.items()]) if isinstance(value, torch.Tensor)}
    names = [key for key, value in weights.items() if tensors.get(id(value)) == key and not key.endswith(_BUFFERS)]
    shapes = {
        number: {one.shape for one in state.values() if _is_like_weights(one)} for number, state in saved["state"].items()
    }
    ours = {number: {weights[name].shape} for number, name in enumerate(names)}
    # A state without such a tensor fits any parameter.
    if len(names) != count or any(number not in ours or shape - ours[number] for number, shape in shapes.items()):
        raise CheckpointError(
            "the checkpoint has no names of the optimizer's parameters, because trainbus 0.2 or another program wrote it, and "
            "they do not follow from their shapes; --weights exports the weights, and a save of a resumed run has the names"
        )
    log.warning(
        "the checkpoint has no names of the optimizer's parameters; they are taken to be in the order of the weights",
        id="optimizer-names-missing",
    )
    return names


def _is_like_weights(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _flat(named: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, state in named["state"].items():
        flat.update(_dotted(f"state.{name}", state))
    for group in named["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        if "lr" in options:
            options.setdefault("initial_lr", options["lr"])  # which its schedules put into each group
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return flat


def _dotted(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _dotted(f"{prefix}.{key}", inner)


DCP_CHECKPOINTS: Final = ForeignFormat(recognises=is_by_name, convert=convert_folder)
register_format(DCP_CHECKPOINTS)
