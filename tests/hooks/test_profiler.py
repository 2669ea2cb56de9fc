"""What ProfilerHook profiles, and where traces go. Real profiles of the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainbus.eventloop import ConfigurationError
from trainbus.hooks import AutogradProfilerHook, ProfilerHook

from ..failing import fails


def steps_of(profiler):
    """How many training steps are in a trace: the model has one batch norm."""
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::native_batch_norm")


@pytest.fixture
def traces():
    """A function for on_trace_ready that counts the steps in each trace."""

    class Traces(list[int]):
        def __call__(self, profiler):
            self.append(steps_of(profiler))

        def __bool__(self):
            return True  # torch asks whether there is a function

    return Traces()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 4),
        ({"profile_times": 2}, 8),
        ({"profile_times": 9}, 12),
        ({"by_epoch": False}, 1),
        ({"by_epoch": False, "profile_times": 6}, 6),
    ],
)
def test_the_first_epochs_or_iterations_are_profiled(job, traces, options, steps):
    job.loop(ProfilerHook(on_trace_ready=traces, **options), max_epochs=3).run()
    assert traces == [steps]


def test_calls_of_handlers_are_ranges_in_the_profile_and_only_there(job):
    names: set[str] = set()
    loop = job.loop(ProfilerHook(on_trace_ready=lambda profiler: names.update(event.key for event in profiler.key_averages())))

    @loop.bus.on("after_train_iter")
    def watch(event): ...

    before = loop.bus.explain("after_train_iter")
    loop.run()
    assert {"watch, after_train_iter", "ProfilerHook, after_train_iter"} <= names
    assert loop.bus.explain("after_train_iter") == before
    assert "record_function" not in before


def test_a_hook_added_during_a_training_begins_with_the_next(job, traces):
    loop = job.loop()
    loop.bus.on("before_train_iter", lambda event: loop.bus.add(ProfilerHook(on_trace_ready=traces)), once=2)
    loop.run()
    assert traces == []


def test_a_schedule_makes_several_traces_of_some_iterations(job, traces):
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    job.loop(ProfilerHook(profile_times=3, schedule=schedule, on_trace_ready=traces), max_epochs=3).run()
    assert traces == [2, 2]


@pytest.mark.parametrize(
    ("trace", "most"), [(None, 99), ({"type": "log_trace", "sort_by": "cpu_time_total", "row_limit": 1}, 1)]
)
def test_by_default_a_table_is_logged_which_takes_its_arguments(job, trace, most, logs):
    job.loop(ProfilerHook(on_trace_ready=trace)).run()
    (entry,) = [entry["event"] for entry in logs if entry["event"].startswith("profile\n")]
    assert "Self CPU" in entry
    assert (entry.count("aten::") > 1) == (trace is None)


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_trace_for_tensorboard_is_in_the_work_dir(job, tmp_path, name, logs):
    trace = {"type": "tb_trace", "worker_name": "worker"} | ({} if name is None else {"dir_name": name})
    job.loop(ProfilerHook(on_trace_ready=trace), work_dir=tmp_path).run()
    (file,) = (tmp_path / (name or "tf_tracing_logs")).iterdir()
    assert file.name.startswith("worker.")
    assert file.name.endswith(".pt.trace.json")


def test_the_json_trace_is_in_chromes_format_and_has_shapes_and_source_lines_on_request(job, tmp_path, logs):
    hook = ProfilerHook(json_trace_path="deep/trace.json", record_shapes=True, with_stack=True)
    job.loop(hook, work_dir=tmp_path).run()
    events = json.loads((tmp_path / "deep" / "trace.json").read_bytes())["traceEvents"]
    shapes = [event["args"]["Input Dims"] for event in events if event["name"] == "aten::linear"]
    assert [[4, 3], [5, 3], [5]] in shapes
    assert any("conftest.py(" in event["name"] for event in events)
    assert not [entry for entry in logs if entry["event"].startswith("profile\n")]


def test_details_are_recorded_on_request(job):
    seen: list[Any] = []

    def look(profiler):
        averages = profiler.key_averages()
        seen.append(sum(event.flops for event in averages))
        seen.append(any(event.self_cpu_memory_usage for event in averages))

    job.loop(ProfilerHook(profile_memory=True, with_flops=True, on_trace_ready=look)).run()
    job.loop(ProfilerHook(on_trace_ready=look)).run()
    assert seen[0] > 0
    assert seen[1:] == [True, 0, False]


def test_a_run_that_fails_ends_the_profile(job, traces, logs):
    loop = job.loop(ProfilerHook(on_trace_ready=traces))
    loop.bus.on("before_train_iter", fails(RuntimeError("mine")), once=3)
    with pytest.raises(RuntimeError, match="mine"):
        loop.run()
    assert traces == [2]
    job.loop(ProfilerHook(on_trace_ready=traces)).run()  # torch's profiler is free for another
    assert traces == [2, 4]


@pytest.mark.parametrize("schedule", [None, {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}])
def test_a_handler_that_fails_is_the_error_of_the_run(job, traces, schedule, logs):
    hook = ProfilerHook(schedule=schedule, on_trace_ready=fails(RuntimeError("mine")))
    with pytest.raises(RuntimeError, match="mine"):
        job.loop(hook).run()
    job.loop(ProfilerHook(on_trace_ready=traces)).run()
    assert traces == [4]


# What torch 2.13 does to some profiles made with with_stack and profile_memory.
NO_UTF8 = UnicodeDecodeError("utf-8", b"\xb0", 0, 1, "invalid start byte")


@pytest.mark.parametrize("given", [None, {"type": "log_trace", "row_limit": 3}])
def test_a_failing_table_leaves_the_trace_in_a_file_and_does_not_end_the_run(job, tmp_path, monkeypatch, given, logs):
    monkeypatch.setattr(profile, "key_averages", fails(NO_UTF8))
    schedule = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    loop = job.loop(ProfilerHook(on_trace_ready=given, schedule=schedule), work_dir=tmp_path)
    loop.run()
    assert loop.counters.epoch == 2
    told = [entry["path"] for entry in logs if entry["log_level"] == "error"]
    assert told == [str(tmp_path / f"profile-step{step}.json") for step in (2, 4)]
    for path in told:
        names = [event["name"] for event in json.loads(Path(path).read_bytes())["traceEvents"]]
        assert "aten::native_batch_norm" in names


@pytest.mark.parametrize("method", ["start", "step", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_does_not_end_the_run(job, tmp_path, monkeypatch, traces, method, logs):
    works = getattr(profile, method)

    def fails(self, *args):
        if method in ("step", "stop"):
            works(self, *args)  # torch's profiler is one for the whole process, and must be let go of
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(profile, method, fails)
        loop = job.loop(ProfilerHook(profile_times=2, json_trace_path="trace.json"), work_dir=tmp_path)
        loop.run()
    assert loop.counters.epoch == 2
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(entry["hook"], entry["exc_info"]) for entry in errors] == [("ProfilerHook", True)]
    if method == "step":
        torch._C._autograd._disable_profiler()
    job.loop(ProfilerHook(on_trace_ready=traces)).run()  # and another one can profile
    assert traces == [4]


def test_a_trace_for_tensorboard_that_cannot_be_written_does_not_end_the_run(job, tmp_path, logs):
    (tmp_path / "tf_tracing_logs").write_text("in the way")
    loop = job.loop(ProfilerHook(on_trace_ready={"type": "tb_trace"}), work_dir=tmp_path)
    loop.run()
    assert loop.counters.epoch == 2
    assert [entry["hook"] for entry in logs if entry["log_level"] == "error"] == ["ProfilerHook"]


def test_a_schedule_that_never_records_is_reported(job, tmp_path, logs):
    hook = ProfilerHook(schedule={"wait": 50, "warmup": 1, "active": 1}, json_trace_path="trace.json")
    job.loop(hook, work_dir=tmp_path).run()
    assert not (tmp_path / "trace.json").exists()
    assert any(entry.get("id") == "profile-empty" for entry in logs)


def test_two_profilers_at_a_time_and_counting_epochs_in_iteration_based_training_are_errors(job, tmp_path, traces, logs):
    hooks = ProfilerHook(on_trace_ready=traces), AutogradProfilerHook(lambda event: True)
    with pytest.raises(ConfigurationError, match=r"AutogradProfilerHook.*ProfilerHook"):
        job.loop(*hooks, work_dir=tmp_path).run()
    job.loop(ProfilerHook(on_trace_ready=traces)).run()
    assert traces == [0, 4]
    with pytest.raises(ConfigurationError, match="by_epoch=False"):
        job.loop(ProfilerHook(), max_iters=3).run()


@pytest.mark.parametrize("activities", ["cpu", ["CPU"], [ProfilerActivity.CPU]])
def test_activities_by_name_or_as_torchs(job, traces, activities):
    job.loop(ProfilerHook(activities=activities, on_trace_ready=traces)).run()
    job.loop(ProfilerHook(activity_with_cpu=True, activity_with_cuda=False, on_trace_ready=traces)).run()
    assert traces == [4, 4]
