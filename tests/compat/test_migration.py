"""The table of other systems' hooks is complete, and everything that it names is here."""

import importlib
import importlib.util
import inspect

import pytest

from trainbus import eventloop, hooks
from trainbus.compat import TABLE
from trainbus.config import OptionChange
from trainbus.eventloop.registry import find

# Names and options of MMEngine 0.10 (mmengine.hooks.__all__ and its signatures), and CheckInvalidLossHook of its tutorial.
MMENGINE_HOOKS = {
    "Hook": "",
    "IterTimerHook": "",
    "DistSamplerSeedHook": "",
    "ParamSchedulerHook": "",
    "SyncBuffersHook": "",
    "EmptyCacheHook": "before_epoch after_epoch after_iter",
    "CheckpointHook": "interval by_epoch save_optimizer save_param_scheduler out_dir max_keep_ckpts save_last save_best rule "
    "greater_keys less_keys file_client_args filename_tmpl backend_args published_keys save_begin",
    "LoggerHook": "interval ignore_last interval_exp_name out_dir out_suffix keep_local file_client_args log_metric_by_epoch "
    "backend_args",
    "NaiveVisualizationHook": "interval draw_gt draw_pred",  # these are of hooks that are not here
    "EMAHook": "ema_type strict_load begin_iter begin_epoch momentum interval update_buffers gamma",
    "RuntimeInfoHook": "",
    "ProfilerHook": "by_epoch profile_times activity_with_cpu activity_with_cuda schedule on_trace_ready record_shapes "
    "profile_memory with_stack with_flops json_trace_path",
    "PrepareTTAHook": "tta_cfg",
    "NPUProfilerHook": "",
    "EarlyStoppingHook": "monitor rule min_delta strict check_finite patience stopping_threshold",
    "CheckInvalidLossHook": "interval",
}
IMIX_HOOKS = {
    "OptimizerHook": "grad_clip",
    "Fp16OptimizerHook": "grad_clip grad_scaler_config",
    "LRSchedulerHook": "optimizer scheduler",
    "MomentumSchedulerHook": "",
    "IterationTimerHook": "warmup_iter",
    "PeriodicLogger": "loggers log_config_period",
    "CommonMetricLogger": "max_iter max_epoch",
    "JSONLogger": "json_file window_size",
    "TensorboardLogger": "log_dir window_size",
    "CheckPointHook": "period iter_period epoch_period max_num_checkpoints prefix",
    "EvaluateHook": "eval_period eval_function eval_json_file",
    "AutogradAnomalyDetectHook": "mode",
    "AutogradProfilerHook": "enable_predicate output_dir use_cuda",
    "EMAIterHook": "config",
    "EMAEpochHook": "config",
    "CallBackHook": "",
}
POINTRIX_HOOKS = {"LogHook": "", "CheckPointHook": "", "Writer": "", "TensorboardWriter": "", "ProgressLogger": ""}
THEIRS = {"MMEngine": MMENGINE_HOOKS, "iMIX": IMIX_HOOKS, "Pointrix": POINTRIX_HOOKS}


@pytest.mark.parametrize("system", THEIRS)
def test_every_hook_of_every_system_is_in_the_table_once(system):
    assert sorted(entry.name for entry in TABLE if entry.system == system) == sorted(THEIRS[system])


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: f"{entry.system}-{entry.name}")
def test_every_option_has_an_entry_and_everything_that_it_names_exists(entry):
    if entry.ours:
        assert set(entry.options) == set(THEIRS[entry.system][entry.name].split())
    found = [getattr(hooks, name, None) or getattr(eventloop, name) for name in entry.ours]
    options = {option for cls in found for option in inspect.signature(cls).parameters}
    changes = [change if isinstance(change, OptionChange) else OptionChange(change) for change in entry.options.values()]
    named = {name for change in changes for name in (change.ours, *change.also)} | {*entry.preset, *entry.defaults}
    assert named - {""} <= options
    # An option without ours has advice, or is dropped whatever its value.
    assert all(change.ours or change.instead or change.says_nothing is None for change in changes)


def test_a_missing_hook_has_a_reason():
    assert [entry.name for entry in TABLE if not entry.ours] == ["NaiveVisualizationHook", "PrepareTTAHook", "NPUProfilerHook"]
    assert all(entry.note.startswith("none: ") for entry in TABLE if not entry.ours)


@pytest.mark.parametrize(
    "entry",
    [one for one in TABLE if one.ours and one.name not in ("Hook", "Writer", "CallBackHook")],
    ids=lambda entry: f"{entry.system}-{entry.name}",
)
def test_names_of_other_systems_are_registered(entry):
    writers = {"CommonMetricLogger", "JSONLogger", "TensorboardLogger", "TensorboardWriter"}
    for name in (entry.name, *entry.aliases):
        assert find("writer" if entry.name in writers else "hook", name) is getattr(hooks, entry.ours[0])


OTHER_DEFAULTS = {("LoggerHook", "out_suffix")}
"""Defaults that differ from MMEngine's on purpose: the logs are of other kinds."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MMEngine imports
@pytest.mark.parametrize(
    "entry", [one for one in TABLE if one.system == "MMEngine" and one.ours and one.options], ids=lambda entry: entry.name
)
def test_an_entry_of_mmengine_has_the_defaults_of_mmengines_class(entry):
    pytest.importorskip("mmengine")
    cls = getattr(importlib.import_module("mmengine.hooks"), entry.name, None)
    if cls is None:
        pytest.skip("a hook of MMEngine's tutorial")
    ours = inspect.signature(getattr(hooks, entry.ours[0])).parameters
    different = set()
    for name, option in inspect.signature(cls).parameters.items():
        change = entry.options.get(name, "")
        if isinstance(change, OptionChange):
            assert option.default in change.says_nothing
        elif option.default is not option.empty and entry.defaults.get(change, ours[change].default) != option.default:
            different.add((entry.name, name))
    assert different <= OTHER_DEFAULTS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MMEngine imports
def test_the_lists_match_the_installed_mmengine():
    if importlib.util.find_spec("mmengine") is None:
        pytest.skip("mmengine is not installed")
    theirs = importlib.import_module("mmengine.hooks")
    assert set(theirs.__all__) == set(MMENGINE_HOOKS) - {"CheckInvalidLossHook"}
    for name in set(theirs.__all__) - {"EMAHook", "NPUProfilerHook"}:
        parameters = inspect.signature(getattr(theirs, name)).parameters.values()
        named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
        assert named == set(MMENGINE_HOOKS[name].split()), name
