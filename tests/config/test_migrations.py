"""Lists of hooks as people have them for MMEngine and iMIX, with the option names of these systems."""

# ruff: noqa: C408 - dict(...) is how people write these lists

from typing import Any

import pytest
import torch

from trainbus import hooks
from trainbus.config import Migration, OptionChange, add_hooks, register_migrations
from trainbus.config.defaults import DEFAULT_HOOKS
from trainbus.config.names import translated
from trainbus.config.setup import merged
from trainbus.eventloop import Bus, ConfigurationError
from trainbus.eventloop.registry import registered

from ..failing import said


def evaluate() -> dict[str, float]:
    return {"accuracy": 0.5}


def soon(event: Any) -> bool:
    return bool(event.progress.iter < 3)


def add(entries, **options):
    bus = Bus()
    add_hooks(bus, entries, **options)
    return bus.hooks


def writers(hook):
    return hook._fanout.writers


# From MMEngine's documentation (docs/en/tutorials/hook.md, docs/en/tutorials/runner.md), and the default_runtime.py of
# MMPretrain and MMSegmentation.
MMENGINE_DEFAULTS = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=16000, save_best="mIoU"),
)
MMENGINE_CUSTOM = [
    dict(type="EMAHook", ema_type="StochasticWeightAverage"),
    dict(type="EMAHook", momentum=1e-4, priority="ABOVE_NORMAL", name="second"),
    dict(type="EMAHook", ema_type="MomentumAnnealingEMA", gamma=50, update_buffers=True, strict_load=False, name="third"),
    dict(type="EmptyCacheHook", after_epoch=True),
    dict(type="SyncBuffersHook"),
    dict(type="CheckInvalidLossHook", interval=50, priority="ABOVE_NORMAL"),
    dict(type="EarlyStoppingHook", monitor="coco/bbox_mAP", patience=10, rule="greater", min_delta=0.001),
    dict(
        type="ProfilerHook",
        by_epoch=False,
        activity_with_cpu=True,
        activity_with_cuda=False,
        schedule=dict(wait=1, warmup=2, active=5),
        on_trace_ready=dict(type="log_trace", sort_by="self_cpu_time_total"),
        with_stack=True,
    ),
    dict(type="ParamSchedulerHook"),
]


def test_mmengines_default_hooks_are_accepted_unchanged():
    chosen = merged(DEFAULT_HOOKS, MMENGINE_DEFAULTS, "default_hooks")
    assert chosen.keys() == DEFAULT_HOOKS.keys()
    made = dict(zip(chosen, add(chosen.values()), strict=True))
    for name, table in MMENGINE_DEFAULTS.items():
        assert type(made[name]).__name__ == table["type"]
    assert (made["checkpoint"].interval, made["checkpoint"].by_epoch) == (16000, False)


def test_names_of_mmengines_default_hooks_change_or_disable_ours():
    off = merged(DEFAULT_HOOKS, dict.fromkeys(MMENGINE_DEFAULTS), "default_hooks")
    assert list(off) == ["optimizer", "run_record", "progress_bar"]
    changed = merged(DEFAULT_HOOKS, {"logger": {"interval": 20}, "checkpoint": {"max_keep_ckpts": 3}}, "default_hooks")
    assert changed["checkpoint"] == {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 3}


def test_a_custom_hooks_list_of_mmengines_is_accepted_as_it_is(bus):
    """Its scheduler hook, without schedulers, subscribes nothing."""
    add_hooks(bus, MMENGINE_CUSTOM)
    assert [type(hook).__name__ for hook in bus.hooks] == [table["type"] for table in MMENGINE_CUSTOM]
    averages = [hooks.StochasticWeightAverage, hooks.WarmupEMA, hooks.MomentumAnnealingEMA]
    assert [hook._type for hook in bus.hooks[:3]] == averages
    assert not [one for one in bus.subscriptions if one.hook is bus.hooks[-1]]


@pytest.mark.parametrize("entry", registered("hook"), ids=lambda entry: entry.name)
def test_a_name_of_ours_has_the_defaults_of_its_class(entry):
    """Whether a hook is made in Python, in a list or in a file; only names that are another system's alone imply options."""
    assert translated(entry.name, {}, "hooks[0]") == {}


def test_averages_and_early_stops_of_a_list_are_those_of_python():
    average, stopping = add(["EMAHook", dict(type="EarlyStoppingHook", monitor="accuracy")])
    assert average._type is hooks.EMAHook()._type is hooks.WarmupEMA
    assert stopping.min_delta == hooks.EarlyStoppingHook("accuracy").min_delta == 0


def test_a_list_of_mmengine_has_mmengines_defaults_if_it_says_so():
    """A class, as opposed to a name, is trainbus's; given options override the defaults."""
    entries = [
        dict(type="EMAHook"),
        dict(type="EarlyStoppingHook", monitor="accuracy"),
        dict(type="ProfilerHook"),
        dict(type="EarlyStoppingHook", monitor="accuracy", min_delta=0.5, name="second"),
        dict(type=hooks.EarlyStoppingHook, monitor="accuracy", name="third"),
        dict(type="PreemptionHook"),
    ]
    average, stopping, profiler, second, third, _ = add(entries, system="MMEngine")
    assert average._type is hooks.ExponentialMovingAverage
    assert (stopping.min_delta, stopping.strict) == (0.1, False)
    assert profiler._options["activities"] == [torch.profiler.ProfilerActivity.CPU]
    assert (second.min_delta, second.strict) == (0.5, False)
    assert (third.min_delta, third.strict) == (0, True)


def test_an_unknown_system_is_an_error_naming_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'mmengine'.*MMEngine"):
        add([], system="mmengine")


# What iMIX's Organizer makes, as a list; then the list of its tutorial (docs, Customize hooks).
IMIX_DEFAULTS = [
    dict(type="OptimizerHook", grad_clip=dict(max_norm=0.25, norm_type=2)),
    dict(type="IterationTimerHook", warmup_iter=3),
    dict(type="CheckPointHook", epoch_period=1, max_num_checkpoints=2, prefix=""),
    dict(type="EvaluateHook", eval_period=500, eval_function=evaluate, eval_json_file="eval_result.json"),
    dict(
        type="PeriodicLogger",
        loggers=[
            dict(type="CommonMetricLoggerHook", max_iter=100, max_epoch=3),
            dict(type="JSONLoggerHook", json_file="metrics.json", window_size=20),
            dict(type="TensorboardLoggerHook", log_dir="runs"),
        ],
        log_config_period=5,
    ),
    dict(type="AutogradAnomalyDetectHook", mode=True),
    dict(type="AutogradProfilerHook", enable_predicate=soon, output_dir="traces", use_cuda=False),
]


def test_imixs_hooks_are_accepted_with_imixs_options():
    pytest.importorskip("tensorboard")
    optimizer, timer, checkpoint, evaluation, logger, anomaly, profiler = add(IMIX_DEFAULTS)
    assert (type(optimizer), type(anomaly)) == (hooks.OptimizerHook, hooks.AutogradAnomalyDetectHook)
    assert type(profiler) is hooks.AutogradProfilerHook
    assert (type(timer), timer.warmup_iter) == (hooks.IterTimerHook, 3)
    assert (type(checkpoint), checkpoint.interval, checkpoint.by_epoch) == (hooks.CheckpointHook, 1, True)
    assert (type(evaluation), evaluation.interval, evaluation._function) == (hooks.EvaluateHook, 500, evaluate)
    assert type(logger) is hooks.LoggerHook
    console, lines, board = writers(logger)
    assert logger._fanout._interval == 5
    assert [writer.interval for writer in (console, lines, board)] == [None] * 3
    assert type(console) is hooks.ConsoleWriter
    assert (type(lines), lines.filename) == (hooks.JSONLinesWriter, "metrics.json")
    assert (type(board), board.directory) == (hooks.TensorBoardWriter, "runs")


def test_imixs_scheduler_hook_and_periods_of_checkpoints_count_iterations():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    periods = [{"type": "CheckPointHook", "name": period, period: 7} for period in ("period", "iter_period")]
    hook, *checkpoints = add([dict(type="LRSchedulerHook", optimizer=optimizer, scheduler=scheduler), *periods])
    assert (type(hook), hook.by, list(hook.schedulers.values())) == (hooks.ParamSchedulerHook, "iter", [scheduler])
    assert [(one.interval, one.by_epoch) for one in checkpoints] == [(7, False)] * 2


def test_pointrixs_names_have_pointrixs_defaults():
    logger, *checkpoints = add(["LogHook", "CheckPointHook", dict(type="CheckPointHook", interval=10, name="other")])
    assert logger._fanout._interval == 1
    assert [(one.interval, one.by_epoch) for one in checkpoints] == [(5000, False), (10, False)]


@pytest.mark.parametrize(
    "entry",
    [
        dict(type="CheckpointHook", file_client_args=None, backend_args=None),
        dict(type="CheckpointHook", file_client_args=dict(backend="disk")),
        dict(type="LoggerHook", backend_args=dict(backend="local")),
        dict(type=hooks.LoggerHook, backend_args=None),
        dict(type="LoggerHook", writers=[dict(type="JSONLogger", window_size=20)]),
    ],
)
def test_an_option_without_an_equivalent_is_accepted_with_our_behaviour(entry):
    assert len(add([entry])) == 1


@pytest.mark.parametrize(
    ("entry", "position", "names"),
    [
        (
            {"type": "CheckpointHook", "backend_args": {"backend": "petrel"}},
            *("hooks[0].backend_args: ", ["MMEngine's CheckpointHook", 'out_dir="s3://bucket/runs"']),
        ),
        (
            {"type": "PeriodicLogger", "loggers": [{"type": "JSONLogger", "window_size": 5}]},
            *("hooks[0].writers[0].window_size: ", ["iMIX's JSONLogger", "int 5", "LoggerHook(window_size=)"]),
        ),
        (
            {"type": "CheckPointHook", "prefix": "model", "period": 5},
            *("hooks[0].prefix: ", ["iMIX's CheckPointHook", "'model'", 'filename_tmpl="mine_{}.safetensors"']),
        ),
        (
            {"type": "EMAIterHook", "config": {"use_ema": True, "ema_decay_ratio": 0.9999}},
            *("hooks[0].config: ", ["iMIX's EMAIterHook", "EMAHook(momentum=)", "1 - ema_decay_ratio"]),
        ),
        ({"type": "CheckPointHook", "iter_period": 5, "epoch_period": 1}, "hooks[0].epoch_period: ", ["called interval in"]),
        ({"type": "EvaluateHook", "eval_period": 5, "interval": 5}, "hooks[0].eval_period: ", ["called interval in trainbus"]),
        (dict(type="CheckPointHook", max_num_checkpoints="x"), "hooks[0].max_keep_ckpts: ", ["expected int, got str 'x'"]),
        (dict(type="ParamSchedulerHook", by="iter"), "hooks[0] (ParamSchedulerHook): ", ["by='iter'", "scheduler"]),
        (dict(type="PrepareTTAHook", tta_cfg={}), "hooks[0].type: 'PrepareTTAHook'", ["MMEngine's: none", "test_step"]),
    ],
)
def test_unsupported_options_are_errors_with_advice(entry, position, names):
    told = said(add, [entry])
    assert told.startswith(position), told
    assert all(name in told for name in names), told


def test_a_user_defined_migration_table():
    entry = Migration("Mine", "EmptyCacheHook", ("EmptyCacheHook",), {"often": "after_iter", "loud": OptionChange(instead="-")})
    register_migrations([entry])
    register_migrations([entry])
    (hook,) = add([dict(type="EmptyCacheHook", often=True, loud=None)])
    assert "after_iter" not in hook.unused()
