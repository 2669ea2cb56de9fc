"""The default hooks of ``trainbus run``: MMEngine's, the update and the progress bar."""

from __future__ import annotations

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
