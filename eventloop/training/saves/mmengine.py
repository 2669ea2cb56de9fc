"""A checkpoint of MMEngine's as the checkpoint of a run, as far as the two mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from eventloop.training.progress import Counters
from eventloop.training.saves.restore import FORMAT

_AVERAGED: Final = "module."  # the prefix of MMEngine's averaged models
_EMA_HOOK: Final = "EMAHook"  # MMEngine's, and ours
_USED: Final = frozenset({"state_dict", "ema_state_dict", "optimizer"})


def is_mmengine(tree: Any) -> bool:
    """Whether MMEngine's Runner has saved this."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("state_dict"), Mapping):
        return False
    meta = tree.get("meta")
    return isinstance(meta, Mapping) and "mmengine_version" in meta and _count(meta, "epoch") is not None


def from_mmengine(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `tree`, from a file of MMEngine's, is as the state of a run.

    A run can go on from it with the weights, the optimizers' states (of a model whose parameters have the same order and
    groups), the counts of epochs and iterations, and the averaged weights of an ``EMAHook``: as in ours, MMEngine's
    ``state_dict`` has the averages and its ``ema_state_dict`` the weights that were trained. Each iteration counts as an
    update. What means something to MMEngine only (its schedulers, message hub, meta data, loss scaler) is kept under
    ``"mmengine"``. Random states and the place in the data are not in its files: the run goes on at the beginning of an epoch.

    Args:
        tree: as `load_pth` reads it; `is_mmengine` says that it is one.
    """
    meta = tree["meta"]
    counters = Counters(epoch=_count(meta, "epoch") or 0, iter=_count(meta, "iter") or 0)
    counters.update = counters.iter
    state: dict[str, Any] = {
        "format": FORMAT,
        "state_dict": dict(tree["state_dict"]),
        "progress": counters.state_dict(),
        "data": None,
        "rng": None,
        "bus": {"hooks": {}, "publishes": {}},
        "stateful": {},
        "info": {},
    }
    rest = {key: value for key, value in tree.items() if key not in _USED}
    averaged = tree.get("ema_state_dict")
    if isinstance(averaged, Mapping):
        state["ema_state_dict"] = _raw_weights(averaged, state["state_dict"])
        state["bus"]["hooks"][_EMA_HOOK] = {"steps": _steps(averaged)}
    optimizers, other = _optimizers(tree.get("optimizer"))
    if optimizers:
        state["optimizer"] = optimizers
    if other:
        rest["optimizer"] = other
    return {**state, "mmengine": rest}


def _raw_weights(averaged: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that were trained. What is not averaged (buffers, with ``update_buffers=False``) is in both the same."""
    raw = {key.removeprefix(_AVERAGED): value for key, value in averaged.items() if key.startswith(_AVERAGED)}
    return {key: raw.get(key, value) for key, value in weights.items()}


def _steps(averaged: Mapping[str, Any]) -> int:
    steps = averaged.get("steps", 0)
    if isinstance(steps, torch.Tensor) and steps.numel() == 1 and steps.dtype is torch.int64:
        steps = steps.item()
    return steps if isinstance(steps, int) and steps >= 0 else 0


def _optimizers(saved: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of torch's optimizers by name, and what MMEngine's wrappers have put beside them."""
    if not isinstance(saved, Mapping):
        return {}, {}
    if "param_groups" in saved:
        saved = {"optimizer": saved}
    ours: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for name, one in saved.items():
        if not isinstance(one, Mapping) or not {"state", "param_groups"} <= one.keys():
            other[name] = one
            continue
        ours[name] = {key: one[key] for key in ("state", "param_groups")}
        if beside := {key: value for key, value in one.items() if key not in ours[name]}:
            other[name] = beside
    return ours, other


def _count(meta: Mapping[str, Any], name: str) -> int | None:
    value = meta.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
