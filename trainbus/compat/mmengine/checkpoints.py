"""Read checkpoints of MMEngine without MMEngine, and convert them to the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from trainbus.eventloop.training import ForeignFormat, imported_state
from trainbus.hooks.ema import RAW_WEIGHTS, EMAHook


def is_mmengine(tree: Any) -> bool:
    """Return True if MMEngine's Runner saved ``tree``."""
    meta = tree.get("meta") if isinstance(tree, Mapping) and isinstance(tree.get("state_dict"), Mapping) else None
    return isinstance(meta, Mapping) and "mmengine_version" in meta and _count(meta, "epoch") is not None


def from_mmengine(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint of MMEngine to the state of a run.

    - A run resumes with the weights, the states of optimizers (if the parameters have the same order and groups), the counts of
      epochs and iterations, and the averaged weights of an ``EMAHook``. Each iteration counts as an update.
    - The file has no random states and no position in the data, so the run resumes at the beginning of an epoch.
    - Entries that only MMEngine uses (schedulers, message hub, meta data, loss scaler) are kept under ``"mmengine"``.
    """
    weights, meta = tree["state_dict"], tree["meta"]
    state = imported_state(weights, epoch=_count(meta, "epoch") or 0, iter=_count(meta, "iter") or 0)
    rest = {key: value for key, value in tree.items() if key not in {"state_dict", "ema_state_dict", "optimizer"}}
    averaged = tree.get("ema_state_dict")
    if isinstance(averaged, Mapping):
        # The raw weights. A tensor without an average (a buffer) has no entry.
        state[RAW_WEIGHTS] = {key: averaged.get(f"module.{key}", value) for key, value in weights.items()}
        state["bus"]["hooks"][EMAHook.__name__] = {"steps": _steps(averaged.get("steps"))}
    optimizers, other = _optimizers(tree.get("optimizer"))
    if optimizers:
        state["optimizer"] = optimizers
    if other:
        rest["optimizer"] = other
    return {**state, "mmengine": rest}


def _converted(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    state = from_mmengine(tree)
    progress, averages = state["progress"], state["bus"]["hooks"].get(EMAHook.__name__)
    resumed = ["weights"]
    if averages is not None:
        resumed.append(f"averages of {averages['steps']} updates (EMAHook)")
    if "optimizer" in state:
        resumed.append("optimizer")
    return state, {
        "from": f"MMEngine {tree['meta']['mmengine_version']}",
        "resumes": "; ".join([*resumed, f"epoch {progress['epoch']}, iteration {progress['iter']}"]),
        "afresh": "schedules, random states, the position in the data (the beginning of an epoch), other hooks",
        "kept": f"under 'mmengine': {', '.join(state['mmengine'])}",
    }


def _count(meta: Mapping[str, Any], name: str) -> int | None:
    value = meta.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _steps(steps: Any) -> int:
    if isinstance(steps, torch.Tensor) and steps.numel() == 1 and steps.dtype is torch.int64:
        steps = steps.item()
    return steps if isinstance(steps, int) and steps >= 0 else 0


def _optimizers(saved: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of torch's optimizers by name, and the entries that MMEngine's wrappers added."""
    if not isinstance(saved, Mapping):
        return {}, {}
    ours: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for name, one in {"optimizer": saved}.items() if "param_groups" in saved else saved.items():
        if not isinstance(one, Mapping) or not {"state", "param_groups"} <= one.keys():
            other[name] = one
            continue
        ours[name] = {key: one[key] for key in ("state", "param_groups")}
        if beside := {key: value for key, value in one.items() if key not in ours[name]}:
            other[name] = beside
    return ours, other


# --------------------------------------------------------------------------------------------- objects in its pickles


def _history(args: tuple[Any, ...], state: Any) -> dict[str, Any]:
    # The state also holds MMEngine's statistics functions, which are dropped.
    return {name: state[f"_{name}"] for name in ("log_history", "count_history")} | {"max_length": state["max_length"]}


def _message_hub(args: tuple[Any, ...], state: Any) -> dict[str, Any]:
    return {name: state[f"_{name}"] for name in ("log_scalars", "runtime_info", "resumed_keys")}


def _config(args: tuple[Any, ...], state: Any) -> dict[Any, Any]:
    (mapping,) = args
    if not isinstance(mapping, Mapping):
        raise TypeError(f"expected a dict, got a {type(mapping).__name__}")
    return dict(mapping)


MMENGINE_CHECKPOINTS: Final = ForeignFormat(recognises=is_mmengine, convert=_converted)
OBJECTS: Final = {
    "mmengine.logging.history_buffer.HistoryBuffer": _history,
    "mmengine.logging.message_hub.MessageHub": _message_hub,
    "mmengine.config.config.ConfigDict": _config,
}
"""What plain data are made of the objects in its pickles."""
