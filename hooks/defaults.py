"""The hooks that ``trainbus run`` adds by itself. MMEngine's names, and two more: the update and the progress bar."""

from __future__ import annotations

from typing import Any

DEFAULT_HOOKS: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "OptimizerHook"},
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "progress_bar": {"type": "ProgressBar"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}
"""By the name under which ``default_hooks`` of a configuration changes, replaces or switches them off."""
