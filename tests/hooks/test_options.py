"""Options of every hook, writer and average that cannot work are errors when the object is made."""

import inspect
import re
import signal
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from trainbus import hooks
from trainbus.eventloop import ConfigurationError
from trainbus.eventloop.annotations import Signature, members
from trainbus.eventloop.bus import GuestHook
from trainbus.eventloop.registry import registered
from trainbus.hooks.smoothing import Smoother

SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
GIVEN = {"enable_predicate": len, "function": dict, "model": nn.Linear(1, 1), "monitor": "loss", "interval": 1}
GIVEN |= {"scheduler": StepLR(SGD, 1), "by": "iter", "to": "http://127.0.0.1:9/hook"}
"""Options without a default."""
AMBIGUOUS = ("val/topk_loss", "accumulated_loss", "auc_loss", "LossAcc")
"""Names of metrics that speak for more and for less."""


def required_of(kind: Any) -> dict[str, Any]:
    """Return the options that a class must be given."""
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: GIVEN[one.name] for one in parameters if one.default is one.empty and one.name in GIVEN}


def catalogue() -> Iterator[Any]:
    """Yield every class that comes with trainbus with each of its options and values that the option's annotation refuses."""
    for entry in (one for kind in ("hook", "writer", "average") for one in registered(kind)):
        # The options of an adapter are objects of another library; its own tests have them.
        if entry.cls.__module__.startswith("trainbus.") and not issubclass(entry.cls, GuestHook):
            for name, option in Signature(entry.cls).options.items():
                for value in wrong(option.annotation):
                    yield pytest.param(entry.cls, name, value, id=f"{entry.name}-{name}-{value!r}")


def wrong(annotation: Any) -> Iterator[Any]:
    """Yield values that look right in a hurry, such as text for a number, and one beyond each bound."""
    known = members(annotation)
    kinds = {typing.get_origin(one.annotation) or one.annotation for one in known}
    if str in kinds:
        yield 3.5j
    elif typing.Literal in kinds:
        yield "bogus"
    else:
        yield "3" if kinds & {int, float} else "no" if bool in kinds else 3.5j
    if kinds & {int, float} and bool not in kinds:
        yield True
    if int in kinds and float not in kinds:
        yield 1.5
    if bool in kinds and int not in kinds:
        yield 1
    for bounds in (one.bounds for one in known if one.bounds is not None):
        beyond = [bounds.gt, bounds.lt, bounds.le and float("nan"), bounds.ge - 1 if bounds.ge in (0, 1) else None]
        yield from (one for one in beyond if one is not None)
        yield from ([] if bounds.min_length is None else [""])


@pytest.mark.parametrize(("kind", "option", "value"), list(catalogue()))
def test_options_that_their_annotation_refuses_are_errors(kind, option, value):
    with pytest.raises(ConfigurationError, match=re.escape(f"{option}={value!r}")):
        kind(**required_of(kind) | {option: value})


WRONG: dict[Any, list[tuple[dict[str, Any], str]]] = {
    hooks.AutogradProfilerHook: [({"enable_predicate": len, "use_cuda": True}, "use_cuda")],  # without CUDA
    hooks.CheckInvalidLossHook: [({"keys": []}, "keys"), ({"keys": [1]}, "keys")],
    hooks.CheckpointHook: [
        ({"interval": 0}, "interval"),
        ({"max_keep_ckpts": 0}, "max_keep_ckpts"),
        ({"rule": "more"}, "rule"),
        ({"save_best": "speed"}, "speed"),
        ({"save_best": ["auto", "acc"]}, "auto"),
        ({"save_best": ["acc/1", "acc:1"]}, "one file name"),
        ({"save_best": []}, "save_best"),
        ({"save_best": {"acc": "less"}}, r"save_best={'acc': 'less'}.*rule="),
        ({"save_best": ["acc", "loss"], "rule": ["greater", "less", "less"]}, "rule=.*'loss'"),
        ({"save_best": ["acc", "loss"], "rule": ["greater", "more"]}, "rule=.*more"),
        *(({"save_best": name}, f"{name}.*'loss'.*rule=") for name in AMBIGUOUS),
        ({"filename_tmpl": "epoch.safetensors"}, "filename_tmpl"),
        ({"filename_tmpl": "epoch_{}.pth"}, "safetensors"),
        ({"filename_tmpl": "a/{}.safetensors"}, "filename_tmpl"),
        ({"published_keys": []}, "published_keys"),
        ({"out_dir": "nowhere://bucket"}, "nowhere://bucket"),
    ],
    hooks.EMAHook: [
        ({"begin_iter": 3}, "begin_iter=.*begin="),
        ({"ema_type": hooks.MomentumAnnealingEMA, "gamma": 0}, "gamma"),  # an option of the average
        ({"ema_type": "EMA"}, "ema_type"),
        ({"gamma": 3}, "gamma"),
        ({"momentun": 0.1}, "momentun=.*momentum="),
        ({"zeta": 0.999}, "zeta=.*ema_type, .*, momentum, interval"),
    ],
    hooks.EmptyCacheHook: [({"after_epoch": False}, "after_epoch")],
    hooks.EvaluateHook: [({"interval": 1, "function": dict, "monitor": "speed"}, "'speed'")],
    hooks.Fp16OptimizerHook: [({"grad_scaler_config": {name: 0.5}}, "scaler") for name in ("scale", "growth_factor")],
    hooks.LoggerHook: [
        ({"keep_local": False}, "out_dir="),
        ({"out_suffix": [1]}, "out_suffix="),
        ({"writers": ["console"]}, r"'console'.* ConsoleWriter\(\)$"),
        ({"writers": [hooks.JSONLinesWriter]}, r"JSONLinesWriter.* JSONLinesWriter\(\)$"),
        ({"writers": [print]}, "<built-in function print>.* hooks.writers.Writer"),
        ({"writers": hooks.ConsoleWriter()}, r"ConsoleWriter.*\[ConsoleWriter\(\), "),
        ({"writers": "tensorboard"}, r"writers='tensorboard'.* TensorBoardWriter\(\)\]"),
    ],
    hooks.OptimizerHook: [
        ({"scaler": {"init_scale": 8.0}}, "scaler"),
        ({"amp": "bf16", "scaler": {"init_scale": 8.0}}, "scaler"),
        ({"amp": "fp16", "scaler": 8.0}, "scaler"),
    ],
    hooks.ParamSchedulerHook: [
        ({"scheduler": ExponentialLR(SGD, 0.5), "by": "metric"}, "monitor"),
        ({"scheduler": ExponentialLR(SGD, 0.5), "by": "iter", "monitor": "loss"}, "monitor"),
        ({"scheduler": ExponentialLR(SGD, 0.5), "by": "metric", "monitor": "loss"}, 'by="iter"'),
        ({"scheduler": dict.fromkeys("ab", ExponentialLR(SGD, 0.5)), "by": "epoch"}, "twice"),
        ({"scheduler": ReduceLROnPlateau(SGD), "by": "epoch"}, 'by="metric"'),
        ({"scheduler": StepLR, "by": "epoch"}, r"scheduler=StepLR.* StepLR\(optimizer"),
        ({"scheduler": 0.1, "by": "iter"}, "step"),
        ({"scheduler": SGD, "by": "epoch"}, "'SGD'"),
        ({"scheduler": [ExponentialLR(SGD, 0.5), ExponentialLR(SGD, 0.5)], "by": "iter"}, "mapping"),
        ({"scheduler": [], "by": "iter"}, r"\[\]"),
    ],
    hooks.PreemptionHook: [
        *(({"signals": one}, "signals=") for one in ((), signal.SIGTERM, ("SIGTREM",), (4711,))),
        ({"signals": ("SIGKILL",)}, "SIGKILL"),
        *(({"exit_code": one}, f"exit_code={one!r}") for one in (0, 256, "75")),
    ],
    hooks.ProfilerHook: [
        ({"activities": []}, "activities"),
        ({"activities": ["gpu"]}, "activities.*'cpu'"),
        ({"activities": "cpu", "activity_with_cpu": True}, "activity_with_cpu"),
        ({"activity_with_cpu": False}, r"activities=\[\].*'cpu'"),
        ({"schedule": {"wait": 1}}, "schedule.*warmup"),
        ({"schedule": {"wait": 0, "warmup": 0, "active": 0}}, "schedule"),
        ({"on_trace_ready": {"type": "table"}}, "log_trace.*tb_trace"),
        ({"on_trace_ready": {"type": "log_trace", "rows": 3}}, "'rows'.*row_limit"),
        ({"on_trace_ready": {"type": "log_trace", "sort_by": "speed"}}, "sort_by"),
        ({"on_trace_ready": {"type": "tb_trace", "directory": "x"}}, "'directory'.*dir_name"),
        ({"json_trace_path": "trace.txt"}, "json_trace_path"),
        ({"json_trace_path": "t.json", "on_trace_ready": {"type": "tb_trace"}}, "dir_name"),
    ],
    Smoother: [  # of hooks.LoggerHook
        ({"mean_pattern": "("}, "mean_pattern="),
        ({"custom_cfg": [{"log_name": "x"}]}, "data_src"),
        ({"custom_cfg": [{"data_src": "loss", "method": "max"}]}, "method_name"),
        ({"custom_cfg": [{"data_src": "loss", "method_name": "median"}]}, "median"),
        ({"custom_cfg": [{"data_src": "loss", "window_size": "week"}]}, "week"),
        ({"custom_cfg": [{"data_src": "loss"}, {"data_src": "loss"}]}, "log_name"),
    ],
}


@pytest.mark.parametrize(("kind", "options", "match"), [(kind, *one) for kind, some in WRONG.items() for one in some])
def test_options_of_the_right_type_that_cannot_work_are_errors(kind, options, match, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(ConfigurationError, match=match):
        kind(**options)


@pytest.mark.parametrize("metric", AMBIGUOUS)
def test_an_ambiguous_metric_is_accepted_with_a_rule(metric):
    hooks.CheckpointHook(save_best=metric, rule="less")
