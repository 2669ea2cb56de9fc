"""The hooks, options and priorities of iMIX, with their names in trainbus."""

from __future__ import annotations

from functools import partial

from trainbus.compat.mmengine.names import same
from trainbus.config import Migration, OptionChange, PriorityScale
from trainbus.eventloop import Priority

PRIORITIES = PriorityScale(
    "iMIX", key="level", names={"HIGHEST": 0, "HIGHER": 10, "HIGH": 20, "NORMAL": 30, "LOW": 40, "LOWER": 50, "LOWEST": 60}
)
"""iMIX's priorities. Its names have other numbers than :class:`trainbus.eventloop.Priority`: its NORMAL is 30."""


def imix_priority(name: str) -> int:
    """Return the number of one of iMIX's seven priority names (``"HIGHER"``, ``"LOWER"`` …), in any case.

    Raises:
        SubscribeError: the name is not one of iMIX's.
    """
    return Priority.parse(name, PRIORITIES.names)


_WINDOW = OptionChange(says_nothing=(20,), instead="LoggerHook(window_size=) averages for all its writers")
_KNOWN = OptionChange(says_nothing=None)
_DECAY = OptionChange(instead="EMAHook(momentum=) averages by itself, momentum is 1 - ema_decay_ratio")
_BY_ITER = OptionChange("interval", also={"by_epoch": False})
_PREFIX = OptionChange(says_nothing=(None, ""), instead='filename_tmpl="mine_{}.safetensors" names files')
_OWN_EMA = "or `EMAHook`, which needs nothing of the model"

_hook = partial(Migration, "iMIX")

TABLE = (
    _hook("OptimizerHook", ("OptimizerHook",), same("grad_clip"), note="accumulation is `accumulate=`"),
    _hook("Fp16OptimizerHook", ("Fp16OptimizerHook",), same("grad_clip grad_scaler_config")),
    _hook(
        "LRSchedulerHook",
        ("ParamSchedulerHook",),
        {"optimizer": _KNOWN, "scheduler": "scheduler"},
        {"by": "iter"},
        "the scheduler knows its optimizer",
    ),
    _hook("MomentumSchedulerHook", ("ParamSchedulerHook",), preset={"by": "iter"}, note="any scheduler, also of momentum"),
    _hook("IterationTimerHook", ("IterTimerHook",), same("warmup_iter")),
    _hook("PeriodicLogger", ("LoggerHook",), {"loggers": "writers", "log_config_period": "interval"}),
    _hook(
        "CommonMetricLogger",
        ("ConsoleWriter",),
        {"max_iter": _KNOWN, "max_epoch": _KNOWN},
        note="knows the limits from the run",
        aliases=("CommonMetricLoggerHook",),
    ),
    _hook(
        "JSONLogger",
        ("JSONLinesWriter",),
        {"json_file": "filename", "window_size": _WINDOW},
        note="windows are the logger's",
        aliases=("JSONLoggerHook",),
    ),
    _hook(
        "TensorboardLogger",
        ("TensorBoardWriter",),
        {"log_dir": "directory", "window_size": _WINDOW},
        note="windows are the logger's",
        aliases=("TensorboardLoggerHook",),
    ),
    _hook(
        "CheckPointHook",
        ("CheckpointHook",),
        {
            "period": _BY_ITER,
            "iter_period": _BY_ITER,
            "epoch_period": "interval",
            "max_num_checkpoints": "max_keep_ckpts",
            "prefix": _PREFIX,
        },
        note="names by `filename_tmpl=`",
    ),
    _hook(
        "EvaluateHook",
        ("EvaluateHook",),
        {"eval_period": "interval", "eval_function": "function", "eval_json_file": "json_file"},
        note="the best checkpoint is `CheckpointHook(save_best=)`'s",
    ),
    _hook("AutogradAnomalyDetectHook", ("AutogradAnomalyDetectHook",), same("mode"), note="on by default here"),
    _hook(
        "AutogradProfilerHook",
        ("AutogradProfilerHook",),
        same("enable_predicate output_dir use_cuda"),
        note="the predicate gets the event: `event.progress.iter`",
    ),
    _hook("EMAIterHook", ("EMAIterHook",), {"config": _DECAY}, note=_OWN_EMA),
    _hook("EMAEpochHook", ("EMAEpochHook",), {"config": _DECAY}, note=_OWN_EMA),
    _hook("CallBackHook", ("Bus",), note='functions subscribe by `bus.on("after_train_iter")`'),
)
