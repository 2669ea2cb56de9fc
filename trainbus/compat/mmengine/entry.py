"""The state that guests need to resume, as an entry of a checkpoint: message hub, schedulers, base values of optimizers.

It has the layout of a converted checkpoint of MMEngine (:mod:`trainbus.compat.mmengine.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from trainbus.hooks.ema import RAW_WEIGHTS, EMAHook

ENTRY: Final = "mmengine"  # key of the entry in a checkpoint

_BASE: Final = "base_param_settings"
_ABSENT: Any = object()


def entry_of(hub: Any, schedulers: Any, wrappers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry. Values that a checkpoint cannot hold are left out, as MMEngine's hub does for some."""
    saved = hub.state_dict()
    entry: dict[str, Any] = {
        "message_hub": {
            "log_scalars": {name: _history(buffer) for name, buffer in saved["log_scalars"].items()},
            "runtime_info": _plain(saved["runtime_info"]),
            "resumed_keys": dict(saved["resumed_keys"]),
        }
    }
    if isinstance(schedulers, Mapping):
        entry["param_schedulers"] = {name: [_plain(one.state_dict()) for one in some] for name, some in schedulers.items()}
    elif schedulers is not None:
        entry["param_schedulers"] = [_plain(one.state_dict()) for one in schedulers]
    bases = {name: one.base_param_settings for name, one in wrappers.items() if one.base_param_settings is not None}
    if bases:
        entry["optimizer"] = {name: {_BASE: dict(base)} for name, base in bases.items()}
    return entry


def restore_hub(hub: Any, entry: Mapping[str, Any]) -> None:
    """Restore the message hub."""
    if (saved := entry.get("message_hub")) is not None:
        known = {*saved["log_scalars"], *saved["runtime_info"]}
        scalars = {
            name: HistoryBuffer(one["log_history"], one["count_history"], one["max_length"])
            for name, one in saved["log_scalars"].items()
        }
        keys = {name: resumed for name, resumed in saved["resumed_keys"].items() if name in known}
        hub.load_state_dict({"log_scalars": scalars, "runtime_info": saved["runtime_info"], "resumed_keys": keys})


def restore_averages(checkpoint: dict[str, Any]) -> None:
    """Pass the averages of trainbus's ``EMAHook`` or of a converted checkpoint to MMEngine's ``EMAHook``, in its layout."""
    saved = checkpoint.get(RAW_WEIGHTS)
    if isinstance(saved, Mapping) and not any(name.startswith("module.") for name in saved):
        steps = checkpoint["bus"]["hooks"].pop(EMAHook.__name__, {}).get("steps", 0)
        raw = {f"module.{name}": value for name, value in {**checkpoint["state_dict"], **saved}.items()}
        checkpoint[RAW_WEIGHTS] = {"steps": torch.tensor(steps), **raw}


def restore_schedulers(schedulers: Any, wrappers: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Restore schedulers and the base values of optimizers with several groups."""
    for name, saved in entry.get("optimizer", {}).items():
        if name in wrappers and _BASE in saved:
            wrappers[name].base_param_settings = dict(saved[_BASE])
    saved = entry.get("param_schedulers")
    if schedulers is None or saved is None:
        return
    pairs = [(schedulers, saved)] if not isinstance(schedulers, Mapping) else [(schedulers[one], saved[one]) for one in saved]
    for some, states in pairs:
        for scheduler, state in zip(some, states, strict=True):
            scheduler.load_state_dict(dict(state))


def _history(buffer: Any) -> dict[str, Any]:
    values, counts = buffer.data
    return {"log_history": np.array(values), "count_history": np.array(counts), "max_length": buffer.max_length}


def _plain(value: Any) -> Any:
    """Return a copy of nested values without values that a checkpoint cannot hold."""
    if isinstance(value, Mapping):
        kept = {key: _plain(entry) for key, entry in value.items()}
        return {key: entry for key, entry in kept.items() if entry is not _ABSENT}
    if isinstance(value, list | tuple):
        kept_ones = [_plain(entry) for entry in value]
        return _ABSENT if any(one is _ABSENT for one in kept_ones) else type(value)(kept_ones)
    plain = value is None or isinstance(value, bool | int | float | str | bytes | np.ndarray | np.generic | torch.Tensor)
    return value if plain else _ABSENT
