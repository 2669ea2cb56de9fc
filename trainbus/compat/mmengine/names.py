"""The hooks and options of MMEngine 0.10, with their names in trainbus."""

from __future__ import annotations

from functools import partial

from trainbus.config import Migration, OptionChange

_LOCAL = (None, {"backend": "disk"}, {"backend": "local"})
_FILES = OptionChange(says_nothing=_LOCAL, instead='out_dir="s3://bucket/runs" says where files go')
_COPIES = OptionChange(says_nothing=_LOCAL, instead="out_dir is a folder of the file system")

_hook = partial(Migration, "MMEngine")


def same(options: str) -> dict[str, str | OptionChange]:
    """Return the entries of options with the same names in trainbus; ``options`` are separated by spaces."""
    return {option: option for option in options.split()}


TABLE = (
    _hook("Hook", ("Hook",), note="priority as there; handlers take one event, see `trainbus events`"),
    _hook("RuntimeInfoHook", ("RuntimeInfoHook",), note="the message hub is `run.info`"),
    _hook("IterTimerHook", ("IterTimerHook",), note="no options there"),
    _hook("DistSamplerSeedHook", ("DistSamplerSeedHook",), note="no options there"),
    _hook(
        "LoggerHook",
        ("LoggerHook",),
        same("interval ignore_last interval_exp_name out_dir out_suffix keep_local log_metric_by_epoch")
        | {"file_client_args": _COPIES, "backend_args": _COPIES},
        note="with window_size, mean_pattern and custom_cfg of its log processor. By default all measurements are averaged; "
        'mean_pattern="loss|time|data_time|grad_norm" is its choice. Files are copied within the file system',
    ),
    _hook(
        "ParamSchedulerHook",
        ("ParamSchedulerHook",),
        note="takes the schedulers themselves, torch's, and `by=`; without any it does nothing, as there",
    ),
    _hook(
        "CheckpointHook",
        ("CheckpointHook",),
        same(
            "interval by_epoch save_optimizer save_param_scheduler out_dir max_keep_ckpts save_last save_best rule "
            "greater_keys less_keys filename_tmpl published_keys"
        )
        | {"save_begin": "begin", "file_client_args": _FILES, "backend_args": _FILES},
        note="files are `.safetensors`; a metric whose name has keys of both rules needs `rule=`",
    ),
    _hook(
        "EMAHook",
        ("EMAHook", "ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"),
        same("ema_type strict_load momentum interval update_buffers gamma")
        | {"begin_iter": "begin", "begin_epoch": OptionChange("begin", also={"by_epoch": True}, says_nothing=(None, 0))},
        defaults={"ema_type": "ExponentialMovingAverage"},
        note='the default average warms up; `ema_type="ExponentialMovingAverage"` is its default. Averages after each '
        "optimizer step; there after each iteration, within an accumulation window, too",
    ),
    _hook(
        "EarlyStoppingHook",
        ("EarlyStoppingHook",),
        same("monitor rule min_delta strict check_finite patience stopping_threshold"),
        defaults={"strict": False, "min_delta": 0.1},
        note="`strict=True` and `min_delta=0` by default, there False and 0.1; an improvement must be larger than `min_delta`, "
        "there it may be equal",
    ),
    _hook("EmptyCacheHook", ("EmptyCacheHook",), same("before_epoch after_epoch after_iter")),
    _hook("SyncBuffersHook", ("SyncBuffersHook",), note="no options there"),
    _hook(
        "ProfilerHook",
        ("ProfilerHook",),
        same(
            "by_epoch profile_times activity_with_cpu activity_with_cuda schedule on_trace_ready record_shapes profile_memory "
            "with_stack with_flops json_trace_path"
        ),
        defaults={"activity_with_cpu": True, "activity_with_cuda": False},
        note="by default it also profiles the accelerator",
    ),
    _hook("CheckInvalidLossHook", ("CheckInvalidLossHook",), same("interval"), note="its tutorial's example"),
    _hook(
        "NaiveVisualizationHook",
        note='none: it draws data samples of OpenMMLab\'s models; report images, or draw with `offload="thread", capture=`',
    ),
    _hook(
        "PrepareTTAHook",
        note="none: it builds OpenMMLab's model wrapper; give `TrainLoop` a `test_step` that averages over augmentations",
    ),
    _hook("NPUProfilerHook", note="none: for Ascend's own profiler; ours uses torch's, on any device it knows"),
)
