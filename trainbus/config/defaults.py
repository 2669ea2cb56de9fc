"""The default hooks of ``trainbus run``: MMEngine's, the update and the progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_HOOKS: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "OptimizerHook"},
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "run_record": {"type": "RunRecordHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "progress_bar": {"type": "ProgressBar"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}
"""Type and options of each default hook. ``default_hooks`` in a configuration changes or disables it by its key here."""


def default_hooks(loop: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the default hooks for a table ``loop``: an iteration-based training saves as often as it validates."""
    if not loop.get("max_iters"):
        return DEFAULT_HOOKS
    by_iter = {"interval": loop.get("val_interval") or 1000, "by_epoch": False}
    return {**DEFAULT_HOOKS, "checkpoint": DEFAULT_HOOKS["checkpoint"] | by_iter}
