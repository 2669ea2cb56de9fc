"""Anomaly detection while training, and traces of chosen iterations."""

import json
from contextlib import nullcontext

import pytest
import torch

from trainbus.eventloop import ConfigurationError
from trainbus.hooks import AutogradAnomalyDetectHook, AutogradProfilerHook

from ..failing import fails


def sqrt_of_zero(model, batch):
    """A loss that is finite, with gradients that are NaN."""
    return ((model(batch[0]) * 0.0).square().sum()).sqrt() * 0.0


def test_a_gradient_that_is_nan_is_an_error_that_names_the_operation(job, logs):
    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="SqrtBackward"):
        job.loop(AutogradAnomalyDetectHook(), step=sqrt_of_zero).run()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("end", ["in order", "by an error"])
def test_anomaly_detection_is_set_during_training_and_restored(job, before, mode, end, logs):
    seen: list[bool] = []

    def look(event):
        seen.append(torch.is_anomaly_enabled())
        if end == "by an error":
            raise ArithmeticError

    loop = job.loop(AutogradAnomalyDetectHook(mode))
    loop.bus.on("before_train_iter", look, once=2)
    with torch.autograd.set_detect_anomaly(before, check_nan=not before):
        with nullcontext() if end == "in order" else pytest.raises(ArithmeticError):
            loop.run()
        assert torch.is_anomaly_enabled() is before
        assert torch.is_anomaly_check_nan_enabled() is not before
    assert seen == [mode]


def operations(file):
    trace = json.loads(file.read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    return [event["name"] for event in events if "name" in event]


def test_each_chosen_iteration_has_a_trace_with_forward_backward_and_step(job, tmp_path, logs):
    job.loop(AutogradProfilerHook(lambda event: 3 <= event.progress.iter < 5, "traces"), work_dir=tmp_path).run()
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == ["profiler-trace-iter4.json", "profiler-trace-iter5.json"]
    for file in files:
        names = operations(file)
        assert names.count("aten::linear") == 2
        assert any("AddmmBackward" in name for name in names)
        assert any(name.startswith("Optimizer.step") for name in names)


def test_the_work_dir_is_the_place_by_default_and_without_any_it_is_an_error_before_training(job, tmp_path, logs):
    job.loop(AutogradProfilerHook(lambda event: event.progress.iter == 0), work_dir=tmp_path).run()
    assert (tmp_path / "profiler-trace-iter1.json").is_file()
    with pytest.raises(ConfigurationError, match="output_dir"):
        job.loop(AutogradProfilerHook(lambda event: False)).run()


def test_an_iteration_that_fails_has_no_trace_and_the_next_run_can_profile(job, tmp_path, logs):
    hook = AutogradProfilerHook(lambda event: True)
    loop = job.loop(hook, work_dir=tmp_path)
    loop.bus.on("after_train_iter", fails(ArithmeticError), once=2)
    with pytest.raises(ArithmeticError):
        loop.run()
    assert [file.name for file in tmp_path.iterdir()] == ["profiler-trace-iter1.json"]
    job.loop(hook, work_dir=tmp_path / "again", max_epochs=1).run()
    assert len(list((tmp_path / "again").iterdir())) == 4
