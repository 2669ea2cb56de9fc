"""Where every hook of MMEngine, iMIX and Pointrix is here, and what its options are called. The README shows it as a table."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

MMENGINE, IMIX, POINTRIX = "MMEngine", "iMIX", "Pointrix"


class Migration(msgspec.Struct, frozen=True):
    """One hook (or writer) of another system.

    ``ours`` are the names of what does the same here: classes of this package, or ``eventloop``'s; none where we have none, and
    ``note`` says why. ``options`` maps its options to ours, and to "" where there is none.
    """

    system: str
    name: str
    ours: tuple[str, ...] = ()
    options: dict[str, str] = {}
    note: str = ""


def _same(*options: str) -> dict[str, str]:
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
        | {"file_client_args": "", "backend_args": ""},
        "with window_size, mean_pattern and custom_cfg of its log processor; files are copied within the file system",
    ),
    Migration(
        MMENGINE,
        "ParamSchedulerHook",
        ("ParamSchedulerHook",),
        note="takes the schedulers themselves, torch's, and `by=`",
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
        | {"file_client_args": "", "backend_args": ""},
        "files are `.safetensors`",
    ),
    Migration(
        MMENGINE,
        "EMAHook",
        ("EMAHook", "ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"),
        _same("ema_type", "strict_load", "begin_iter", "begin_epoch", "momentum", "interval", "update_buffers", "gamma"),
    ),
    Migration(
        MMENGINE,
        "EarlyStoppingHook",
        ("EarlyStoppingHook",),
        _same("monitor", "rule", "min_delta", "strict", "check_finite", "patience", "stopping_threshold"),
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
    Migration(MMENGINE, "CheckInvalidLossHook", ("CheckInvalidLossHook",), _same("interval"), "its tutorial's example"),
    Migration(
        MMENGINE,
        "NaiveVisualizationHook",
        options={"interval": "", "draw_gt": "", "draw_pred": ""},
        note='none: it draws data samples of OpenMMLab\'s models; report images, or draw with `offload="thread", capture=`',
    ),
    Migration(
        MMENGINE,
        "PrepareTTAHook",
        options={"tta_cfg": ""},
        note="none: it builds OpenMMLab's model wrapper; give `TrainLoop` a `test_step` that averages over augmentations",
    ),
    Migration(MMENGINE, "NPUProfilerHook", note="none: for Ascend's own profiler; ours uses torch's, on any device it knows"),
    Migration(IMIX, "OptimizerHook", ("OptimizerHook",), _same("grad_clip"), "accumulation is `accumulate=`"),
    Migration(IMIX, "Fp16OptimizerHook", ("Fp16OptimizerHook",), _same("grad_clip", "grad_scaler_config")),
    Migration(
        IMIX,
        "LRSchedulerHook",
        ("ParamSchedulerHook",),
        {"optimizer": "", "scheduler": "scheduler"},
        'with `by="iter"`; the scheduler knows its optimizer',
    ),
    Migration(IMIX, "MomentumSchedulerHook", ("ParamSchedulerHook",), note="any scheduler, also of momentum"),
    Migration(IMIX, "IterationTimerHook", ("IterTimerHook",), _same("warmup_iter")),
    Migration(
        IMIX, "PeriodicLogger", ("LoggerHook",), {"loggers": "writers", "log_config_period": "interval"}, "writers: see below"
    ),
    Migration(
        IMIX, "CommonMetricLogger", ("ConsoleWriter",), {"max_iter": "", "max_epoch": ""}, "knows the limits from the run"
    ),
    Migration(
        IMIX, "JSONLogger", ("JSONLinesWriter",), {"json_file": "filename", "window_size": ""}, "windows are the logger's"
    ),
    Migration(
        IMIX,
        "TensorboardLogger",
        ("TensorBoardWriter",),
        {"log_dir": "directory", "window_size": ""},
        "windows are the logger's",
    ),
    Migration(
        IMIX,
        "CheckPointHook",
        ("CheckpointHook",),
        {"period": "interval", "prefix": ""},
        "names by `filename_tmpl=`",
    ),
    Migration(
        IMIX,
        "EvaluateHook",
        ("EvaluateHook",),
        {"eval_period": "period", "eval_function": "function", "eval_json_file": "json_file"},
        "the best checkpoint is `CheckpointHook(save_best=)`'s",
    ),
    Migration(IMIX, "AutogradAnomalyDetectHook", ("AutogradAnomalyDetectHook",), _same("mode"), "on by default here"),
    Migration(
        IMIX,
        "AutogradProfilerHook",
        ("AutogradProfilerHook",),
        _same("enable_predicate", "output_dir", "use_cuda"),
        "the predicate gets the event: `event.progress.iter`",
    ),
    Migration(IMIX, "EMAIterHook", ("EMAIterHook",), note="or `EMAHook`, which needs nothing of the model"),
    Migration(IMIX, "EMAEpochHook", ("EMAEpochHook",), note="or `EMAHook`, which needs nothing of the model"),
    Migration(IMIX, "CallBackHook", ("Bus",), note='functions subscribe by `bus.on("after_train_iter")`'),
    Migration(
        POINTRIX,
        "LogHook",
        ("LoggerHook", "ProgressBar"),
        note="losses on the bar are smoothed the same way, 0.4·new + 0.6·old; `LoggerHook(interval=1)` writes each step",
    ),
    Migration(
        POINTRIX, "CheckPointHook", ("CheckpointHook",), note="its period of 5,000 steps: `interval=5000, by_epoch=False`"
    ),
    Migration(POINTRIX, "Writer", ("Writer",), note="`write_scalars` takes the scalars of one moment at once"),
    Migration(POINTRIX, "TensorboardWriter", ("TensorBoardWriter",), note="a folder of the work dir: `directory=`"),
    Migration(POINTRIX, "ProgressLogger", ("ProgressBar",), note="made by its LogHook there"),
)
"""Every hook of MMEngine, then of iMIX, then of Pointrix."""


def table() -> str:
    """Return :data:`TABLE` in Markdown."""
    return "\n".join(("| there | here | options |", "|---|---|---|", *_rows()))


def _rows() -> Iterator[str]:
    for entry in TABLE:
        here = ", ".join(f"`{name}`" for name in entry.ours) or "-"
        renamed = ", ".join(f"`{theirs}` → `{ours}`" for theirs, ours in entry.options.items() if ours not in ("", theirs))
        same = "the same" if any(theirs == ours for theirs, ours in entry.options.items()) else ""
        gone = ", ".join(f"`{theirs}`" for theirs, ours in entry.options.items() if not ours)
        parts = (same, renamed, f"no {gone}" if gone and entry.ours else "", entry.note)
        yield f"| {entry.system} `{entry.name}` | {here} | {'; '.join(part for part in parts if part)} |"
