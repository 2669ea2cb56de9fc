"""Options as they are where nothing is said, and the places of hooks in a mount point: those that their users know."""

import inspect
from typing import Any

import pytest

import hooks
from eventloop import Priority
from hooks.defaults import DEFAULT_HOOKS
from hooks.smoothing import MEASURED

DEFAULTS: dict[str, dict[str, Any]] = {
    "AutogradAnomalyDetectHook": {"mode": True},
    "CheckInvalidLossHook": {"interval": 50},
    "CheckpointHook": {
        "interval": -1,
        "by_epoch": True,
        "save_optimizer": True,
        "save_param_scheduler": True,
        "out_dir": None,
        "max_keep_ckpts": -1,
        "save_last": True,
        "save_best": None,
        "rule": None,
        "greater_keys": None,
        "less_keys": None,
        "filename_tmpl": None,
        "published_keys": None,
        "save_begin": 0,
    },
    "EMAHook": {"ema_type": hooks.WarmupEMA, "strict_load": False, "begin_iter": 0, "begin_epoch": 0},
    "EarlyStoppingHook": {
        "rule": None,
        "min_delta": 0.1,
        "strict": True,
        "check_finite": True,
        "patience": 5,
        "stopping_threshold": None,
    },
    "EmptyCacheHook": {"before_epoch": False, "after_epoch": True, "after_iter": False},
    "ExponentialMovingAverage": {"momentum": 0.0002, "interval": 1, "update_buffers": False},
    "IterTimerHook": {"warmup_iter": 0},
    "LoggerHook": {
        "interval": 10,
        "ignore_last": True,
        "interval_exp_name": 1000,
        "out_dir": None,
        "keep_local": True,
        "log_metric_by_epoch": True,
        "window_size": 10,
        "mean_pattern": MEASURED,  # MMEngine's leaves other measurements unaveraged beside averaged ones
    },
    "ConsoleWriter": {"num_digits": 4},
    "MomentumAnnealingEMA": {"momentum": 0.0002, "gamma": 100, "interval": 1, "update_buffers": False},
    "OptimizerHook": {"accumulate": 1, "grad_clip": None, "amp": None, "scaler": None},
    "ProfilerHook": {
        "by_epoch": True,
        "profile_times": 1,
        "activities": None,
        "schedule": None,
        "on_trace_ready": None,
        "record_shapes": False,
        "profile_memory": False,
        "with_stack": False,
        "with_flops": False,
        "json_trace_path": None,
    },
    "StochasticWeightAverage": {"interval": 1, "update_buffers": False},
}

PRIORITIES = {
    "RuntimeInfoHook": 10,
    "OptimizerHook": 30,
    "Fp16OptimizerHook": 30,
    "CheckInvalidLossHook": 50,
    "DistSamplerSeedHook": 50,
    "EMAHook": 50,
    "EmptyCacheHook": 50,
    "IterTimerHook": 50,
    "SyncBuffersHook": 50,
    "LoggerHook": 60,
    "ParamSchedulerHook": 70,
    "CheckpointHook": 90,
    "ProfilerHook": 90,
    "EarlyStoppingHook": 100,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    parameters = inspect.signature(getattr(hooks, name)).parameters
    assert {option: parameters[option].default for option in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("name", PRIORITIES)
def test_priorities(name):
    assert Priority.parse(getattr(hooks, name).priority) == PRIORITIES[name]


def test_the_logger_copies_at_least_the_files_that_mmengines_does():
    suffixes = inspect.signature(hooks.LoggerHook).parameters["out_suffix"].default
    assert {".json", ".log", ".py", "yaml"} <= set(suffixes)


def test_as_a_default_hook_checkpoints_are_saved_every_epoch():
    assert DEFAULT_HOOKS["checkpoint"] == {"type": "CheckpointHook", "interval": 1}
