"""Where every hook of MMEngine, iMIX and Pointrix is here, and what its options are called. The README shows it as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eventloop import Migration, OptionChange, register_migrations

MMENGINE, IMIX, POINTRIX = "MMEngine", "iMIX", "Pointrix"

_FILES = OptionChange(
    says_nothing=(None, {"backend": "disk"}, {"backend": "local"}), instead='out_dir="s3://bucket/runs" says where files go'
)
_COPIES = OptionChange(
    says_nothing=(None, {"backend": "disk"}, {"backend": "local"}), instead="out_dir is a folder of the file system"
)
_WINDOW = OptionChange(says_nothing=(20,), instead="LoggerHook(window_size=) averages for all its writers")
_KNOWN = OptionChange(says_nothing=None)
_DECAY = OptionChange(instead="EMAHook(momentum=) averages by itself, momentum is 1 - ema_decay_ratio")
_BY_ITER = OptionChange("interval", also={"by_epoch": False})


def _same(*options: str) -> dict[str, str | OptionChange]:
    return {option: option for option in options}


TABLE: tuple[Migration, ...] = (
    Migration(MMENGINE, "Hook", ("Hook",), note="priority as there; handlers take one event, see `trainbus events`"),
    Migration(MMENGINE, "RuntimeInfoHook", ("RuntimeInfoHook",), note="the message hub is `run.info`"),
    Migration(MMENGINE, "IterTimerHook", ("IterTimerHook",), note="no options there"),
    Migration(MMENGINE, "DistSamplerSeedHook", ("DistSamplerSeedHook",), note="no options there"),
    Migration(
        MMENGINE,
        "LoggerHook",
        ("LoggerHook",),
        _same("interval", "ignore_last", "interval_exp_name", "out_dir", "out_suffix", "keep_local", "log_metric_by_epoch")
        | {"file_client_args": _COPIES, "backend_args": _COPIES},
        note="with window_size, mean_pattern and custom_cfg of its log processor; files are copied within the file system",
    ),
    Migration(
        MMENGINE,
        "ParamSchedulerHook",
        ("ParamSchedulerHook",),
        note="takes the schedulers themselves, torch's, and `by=`; without any it does nothing, as there",
    ),
    Migration(
        MMENGINE,
        "CheckpointHook",
        ("CheckpointHook",),
        _same(
            "interval",
            "by_epoch",
            "save_optimizer",
            "save_param_scheduler",
            "out_dir",
            "max_keep_ckpts",
            "save_last",
            "save_best",
            "rule",
            "greater_keys",
            "less_keys",
            "filename_tmpl",
            "published_keys",
            "save_begin",
        )
        | {"file_client_args": _FILES, "backend_args": _FILES},
        note="files are `.safetensors`; a metric whose name has keys of both rules needs `rule=`",
    ),
    Migration(
        MMENGINE,
        "EMAHook",
        ("EMAHook", "ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"),
        _same("ema_type", "strict_load", "begin_iter", "begin_epoch", "momentum", "interval", "update_buffers", "gamma"),
        note="averages after each optimizer step; there after each iteration, within an accumulation window, too",
    ),
    Migration(
        MMENGINE,
        "EarlyStoppingHook",
        ("EarlyStoppingHook",),
        _same("monitor", "rule", "min_delta", "strict", "check_finite", "patience", "stopping_threshold"),
        note="an improvement must be larger than `min_delta`; there one of exactly `min_delta` counts, too",
    ),
    Migration(MMENGINE, "EmptyCacheHook", ("EmptyCacheHook",), _same("before_epoch", "after_epoch", "after_iter")),
    Migration(MMENGINE, "SyncBuffersHook", ("SyncBuffersHook",), note="no options there"),
    Migration(
        MMENGINE,
        "ProfilerHook",
        ("ProfilerHook",),
        _same(
            "by_epoch",
            "profile_times",
            "activity_with_cpu",
            "activity_with_cuda",
            "schedule",
            "on_trace_ready",
            "record_shapes",
            "profile_memory",
            "with_stack",
            "with_flops",
            "json_trace_path",
        ),
    ),
    Migration(MMENGINE, "CheckInvalidLossHook", ("CheckInvalidLossHook",), _same("interval"), note="its tutorial's example"),
    Migration(
        MMENGINE,
        "NaiveVisualizationHook",
        note='none: it draws data samples of OpenMMLab\'s models; report images, or draw with `offload="thread", capture=`',
    ),
    Migration(
        MMENGINE,
        "PrepareTTAHook",
        note="none: it builds OpenMMLab's model wrapper; give `TrainLoop` a `test_step` that averages over augmentations",
    ),
    Migration(MMENGINE, "NPUProfilerHook", note="none: for Ascend's own profiler; ours uses torch's, on any device it knows"),
    Migration(IMIX, "OptimizerHook", ("OptimizerHook",), _same("grad_clip"), note="accumulation is `accumulate=`"),
    Migration(IMIX, "Fp16OptimizerHook", ("Fp16OptimizerHook",), _same("grad_clip", "grad_scaler_config")),
    Migration(
        IMIX,
        "LRSchedulerHook",
        ("ParamSchedulerHook",),
        {"optimizer": _KNOWN, "scheduler": "scheduler"},
        {"by": "iter"},
        "the scheduler knows its optimizer",
    ),
    Migration(
        IMIX, "MomentumSchedulerHook", ("ParamSchedulerHook",), preset={"by": "iter"}, note="any scheduler, also of momentum"
    ),
    Migration(IMIX, "IterationTimerHook", ("IterTimerHook",), _same("warmup_iter")),
    Migration(IMIX, "PeriodicLogger", ("LoggerHook",), {"loggers": "writers", "log_config_period": "interval"}),
    Migration(
        IMIX,
        "CommonMetricLogger",
        ("ConsoleWriter",),
        {"max_iter": _KNOWN, "max_epoch": _KNOWN},
        note="knows the limits from the run",
        aliases=("CommonMetricLoggerHook",),
    ),
    Migration(
        IMIX,
        "JSONLogger",
        ("JSONLinesWriter",),
        {"json_file": "filename", "window_size": _WINDOW},
        note="windows are the logger's",
        aliases=("JSONLoggerHook",),
    ),
    Migration(
        IMIX,
        "TensorboardLogger",
        ("TensorBoardWriter",),
        {"log_dir": "directory", "window_size": _WINDOW},
        note="windows are the logger's",
        aliases=("TensorboardLoggerHook",),
    ),
    Migration(
        IMIX,
        "CheckPointHook",
        ("CheckpointHook",),
        {
            "period": _BY_ITER,
            "iter_period": _BY_ITER,
            "epoch_period": "interval",
            "max_num_checkpoints": "max_keep_ckpts",
            "prefix": OptionChange(says_nothing=(None, ""), instead='filename_tmpl="mine_{}.safetensors" names files'),
        },
        note="names by `filename_tmpl=`",
    ),
    Migration(
        IMIX,
        "EvaluateHook",
        ("EvaluateHook",),
        {"eval_period": "period", "eval_function": "function", "eval_json_file": "json_file"},
        note="the best checkpoint is `CheckpointHook(save_best=)`'s",
    ),
    Migration(IMIX, "AutogradAnomalyDetectHook", ("AutogradAnomalyDetectHook",), _same("mode"), note="on by default here"),
    Migration(
        IMIX,
        "AutogradProfilerHook",
        ("AutogradProfilerHook",),
        _same("enable_predicate", "output_dir", "use_cuda"),
        note="the predicate gets the event: `event.progress.iter`",
    ),
    Migration(IMIX, "EMAIterHook", ("EMAIterHook",), {"config": _DECAY}, note="or `EMAHook`, which needs nothing of the model"),
    Migration(
        IMIX, "EMAEpochHook", ("EMAEpochHook",), {"config": _DECAY}, note="or `EMAHook`, which needs nothing of the model"
    ),
    Migration(IMIX, "CallBackHook", ("Bus",), note='functions subscribe by `bus.on("after_train_iter")`'),
    Migration(
        POINTRIX,
        "LogHook",
        ("LoggerHook", "ProgressBar"),
        preset={"interval": 1},
        note="losses on the bar are smoothed the same way, 0.4·new + 0.6·old",
    ),
    Migration(POINTRIX, "CheckPointHook", ("CheckpointHook",), preset={"interval": 5000, "by_epoch": False}),
    Migration(POINTRIX, "Writer", ("Writer",), note="`write_scalars` takes the scalars of one moment at once"),
    Migration(POINTRIX, "TensorboardWriter", ("TensorBoardWriter",), note="a folder of the work dir: `directory=`"),
    Migration(POINTRIX, "ProgressLogger", ("ProgressBar",), note="made by its LogHook there"),
)
"""Every hook of MMEngine, then of iMIX, then of Pointrix."""


register_migrations(TABLE)


def table() -> str:
    """Return :data:`TABLE` in Markdown."""
    return "\n".join(("| there | here | options |", "|---|---|---|", *_rows()))


def _rows() -> Iterator[str]:
    for entry in TABLE:
        here = ", ".join(f"`{name}`" for name in entry.ours) or "-"
        names = {theirs: entry.renamed(theirs) for theirs in entry.options}
        same = "the same" if any(theirs == ours for theirs, ours in names.items()) else ""
        changed = ", ".join(
            f"`{theirs}` → `{ours}`{_also(entry, theirs)}" for theirs, ours in names.items() if ours not in ("", theirs)
        )
        gone = ", ".join(f"`{theirs}`" for theirs, ours in names.items() if not ours)
        preset = f"`{_written(entry.preset)}`" if entry.preset else ""
        parts = (same, changed, f"no {gone}" if gone else "", preset, entry.note)
        there = ", ".join(f"`{name}`" for name in (entry.name, *entry.aliases))
        yield f"| {entry.system} {there} | {here} | {'; '.join(part for part in parts if part)} |"


def _also(entry: Migration, option: str) -> str:
    change = entry.options[option]
    return f" with `{_written(change.also)}`" if isinstance(change, OptionChange) and change.also else ""


def _written(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
