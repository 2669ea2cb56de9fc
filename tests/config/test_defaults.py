"""Options as they are where nothing is said, and the places of hooks in a mount point: those that their users know."""

import importlib
import inspect

import pytest

from trainbus import hooks
from trainbus.compat.mmengine.names import TABLE
from trainbus.config.defaults import DEFAULT_HOOKS
from trainbus.eventloop import Priority
from trainbus.hooks.smoothing import MEASURED

OURS = {
    "AutogradAnomalyDetectHook": {"mode": True},
    "CheckInvalidLossHook": {"interval": 50},
    "ConsoleWriter": {"num_digits": 4},
    "EMAHook": {"ema_type": hooks.WarmupEMA},
    "EarlyStoppingHook": {"strict": True, "min_delta": 0},
    "IterTimerHook": {"warmup_iter": 0},
    "LoggerHook": {"window_size": 10, "mean_pattern": MEASURED},  # MMEngine's pattern leaves some measurements unaveraged
    "OptimizerHook": {"accumulate": 1, "grad_clip": None, "amp": None, "scaler": None},
    "ProfilerHook": {"activities": None, "activity_with_cpu": None, "activity_with_cuda": None},  # all that torch can
}
MMENGINES = [
    *(("hooks", entry.name) for entry in TABLE if entry.ours and entry.name not in ("Hook", "CheckInvalidLossHook")),
    *(("model", name) for name in ("ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage")),
]


def defaults(kind):
    return {name: one.default for name, one in inspect.signature(kind).parameters.items()}


@pytest.mark.parametrize("name", OURS)
def test_our_own_defaults(name):
    assert defaults(getattr(hooks, name)).items() >= OURS[name].items()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MMEngine imports
@pytest.mark.parametrize(("module", "name"), MMENGINES)
def test_defaults_and_priorities_are_mmengines(module, name):
    pytest.importorskip("mmengine.runner")
    theirs, ours = getattr(importlib.import_module(f"mmengine.{module}"), name), getattr(hooks, name)
    shared = defaults(theirs).keys() & defaults(ours).keys() - OURS.get(name, {}).keys() - {"model", "out_suffix"}
    assert {one: defaults(ours)[one] for one in shared} == {one: defaults(theirs)[one] for one in shared}
    if module == "hooks":
        assert Priority.parse(ours.priority) == Priority.parse(theirs.priority)


def test_priorities_of_our_own_files_that_the_logger_copies_and_checkpoints_of_every_epoch_by_default():
    kinds = hooks.OptimizerHook, hooks.Fp16OptimizerHook, hooks.CheckInvalidLossHook
    assert [Priority.parse(kind.priority) for kind in kinds] == [30, 30, 50]
    assert {".json", ".log", ".py", "yaml"} <= set(defaults(hooks.LoggerHook)["out_suffix"])  # MMEngine's, and more
    assert DEFAULT_HOOKS["checkpoint"] == {"type": "CheckpointHook", "interval": 1}
