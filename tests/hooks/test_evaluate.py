"""When EvaluateHook calls its function, where results go, and that the best one is kept."""

import csv
import json
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, ConfigurationError, Hook, Progress, TrainingError
from trainbus.hooks import CheckpointHook, CSVWriter, Evaluated, EvaluateHook, JSONLinesWriter, LoggerHook


class Function:
    """Returns one result after another, and notes at which count of iterations it was called."""

    def __init__(self, *results):
        self.results = list(results)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.results.pop(0) if self.results else {"acc": 0.5}


def evaluated(job, hook, *more, **options):
    """Runs a training of two epochs of four batches; returns the events of the hook."""
    loop = job.loop(hook, *more, **options)
    events: list[Any] = []
    loop.bus.on("evaluated", events.append)
    with capture_logs():
        loop.run()
    return events


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"interval": 3}, [3, 6, 8]),
        ({"interval": 4}, [4, 8]),
        ({"interval": 0}, [8]),
        ({"interval": 99}, [8]),
        ({"interval": 1, "by_epoch": True}, [4, 8]),
        ({"interval": 2, "by_epoch": True}, [8]),
        ({"interval": 3, "by_epoch": True}, [8]),
    ],
)
def test_it_is_called_every_period_and_at_the_end(job, options, iterations):
    function = Function()
    events = evaluated(job, EvaluateHook(function=function, **options))
    assert [event.iter for event in events] == iterations
    assert function.calls == len(iterations)
    assert events[-1].epoch == 2


def test_a_stopped_run_is_evaluated_at_its_end(job):
    assert [event.iter for event in evaluated(job, EvaluateHook(0, Function()), job.StopAfter(5))] == [5]


def test_it_runs_in_evaluation_mode_without_gradients(job):
    model = job.model()
    model[1].eval()  # a layer that is frozen stays so
    seen: list[Any] = []

    def function():
        seen.append((torch.is_grad_enabled(), any(module.training for module in model.modules())))
        return {"acc": 0.5}

    evaluated(job, EvaluateHook(4, function), model=model)
    assert seen == [(False, False)] * 2
    assert [module.training for module in model] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "results", "best"),
    [
        ({}, [{"acc": 0.1}, {"acc": 0.9}, {"acc": 0.5}], 6),
        ({}, [{"acc": 0.9}, {"acc": 0.9}, {"acc": 0.5}], 3),
        ({}, [{"loss": 0.1}, {"loss": 0.9}, {"loss": 0.5}], 3),
        ({"rule": "less"}, [{"acc": 0.1}, {"acc": 0.9}, {"acc": 0.5}], 3),
        ({"monitor": "loss"}, [{"acc": 1, "loss": 3}, {"acc": 2, "loss": 2}, {"acc": 3, "loss": 1}], 8),
        ({}, [{"acc": float("nan")}, {"acc": 0.2}, {"acc": 0.1}], 6),
        ({}, [None, {"acc": 0.2}, {}], 6),
    ],
)
def test_the_best_result_is_kept_and_logged_at_the_end(job, options, results, best, logs):
    hook = EvaluateHook(3, Function(*results), **options)
    job.loop(hook).run()
    (entry,) = [entry for entry in logs if entry["event"] == "best evaluation"]
    assert (hook.best.iter, entry["iter"]) == (best, best)
    assert entry["metrics"] == hook.best.metrics


def test_nested_results_and_tensors_are_flat_numbers(job, tmp_path, logs):
    infos: list[Any] = []
    result = {"coco": {"AP": {"small": torch.tensor(0.25)}, "acc": 1}, "loss": torch.ones(1)}
    loop = job.loop(EvaluateHook(0, Function(result), monitor="loss"), work_dir=tmp_path)
    loop.bus.on("after_run", lambda event: infos.append(dict(event.run.info)))
    loop.run()
    numbers = {name: value for name, value in infos[0].items() if name.startswith("eval/")}
    assert numbers == {"eval/coco/AP/small": 0.25, "eval/coco/acc": 1.0, "eval/loss": 1.0}


@pytest.mark.parametrize("file", ["eval_result.json", "deep/results.json"])
def test_results_are_lines_of_json_in_the_work_dir(job, tmp_path, file):
    evaluated(job, EvaluateHook(4, Function({"acc": 0.5}, {"acc": float("nan")}), json_file=file), work_dir=tmp_path)
    text = (tmp_path / file).read_text()
    assert text == '{"epoch": 1, "iter": 4, "acc": 0.5}\n{"epoch": 2, "iter": 8, "acc": NaN}\n'


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_of_several_processes_the_first_one_writes_the_file(tmp_path, rank, lines):
    bus, progress = Bus(EvaluateHook(4, Function())), Progress()
    bus.internal.set_rank(rank, 2)
    with bus:
        facts = {"hook": "EvaluateHook", "epoch": 1, "iter": 4, "metrics": {"acc": 0.5}, "work_dir": str(tmp_path)}
        bus.publish(Evaluated(progress=progress, **facts))
    assert len(list(tmp_path.glob("*.json"))) == lines


def test_loggers_write_results_in_order_with_iterations_as_step(job, tmp_path):
    hook = EvaluateHook(3, Function({"acc": 0.5}, {"coco": {"AP": float("nan")}, "acc": 0.25}))
    evaluated(job, LoggerHook(interval=1, writers=[JSONLinesWriter()]), hook, work_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 8]
    assert [
        {name: value for name, value in line.items() if name.startswith("eval/")} for line in lines if "train/loss" not in line
    ] == [{"eval/acc": 0.5}, {"eval/coco/AP": pytest.approx(float("nan"), nan_ok=True), "eval/acc": 0.25}, {"eval/acc": 0.5}]
    assert (lines[3]["epoch"], lines[3]["iter"]) == (1, 3)


def test_a_hook_of_the_users_can_publish_results_for_loggers(job, tmp_path):
    class Norms(Hook):
        def after_train_epoch(self, event):
            epoch, iteration = event.progress.epoch + 1, event.progress.iter + 1
            event.run.publish(Evaluated, hook=self.label, epoch=epoch, iter=iteration, metrics={"norm": 2.0})

    logger = LoggerHook(interval=9, writers=[CSVWriter()])
    job.loop(logger, Norms(), EvaluateHook(0, lambda: None), work_dir=tmp_path).run()
    with (tmp_path / "scalars.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["eval/norm"] == "2.0"] == ["4", "8"]
    assert not (tmp_path / "eval_result.json").exists()


def test_no_file_is_written_without_json_file_or_work_dir(job, tmp_path):
    evaluated(job, EvaluateHook(4, Function(), json_file=None), work_dir=tmp_path)
    evaluated(job, EvaluateHook(4, Function()))
    assert not list(tmp_path.iterdir())


def test_the_best_survives_a_resume(job, tmp_path, logs):
    evaluated(job, EvaluateHook(4, Function({"acc": 0.9})), CheckpointHook(1), work_dir=tmp_path, max_epochs=1)
    hook = EvaluateHook(4, Function({"acc": 0.5}))
    loop = job.loop(hook, CheckpointHook(1), work_dir=tmp_path)
    loop.run(resume="auto")
    assert hook.best is not None
    assert (hook.best.iter, hook.best.metrics) == (4, {"acc": 0.9})
    other = EvaluateHook(4, Function({"acc": 0.1, "loss": 3.0}), monitor="loss")
    job.loop(other, CheckpointHook(1), work_dir=tmp_path, max_epochs=3).run(resume="auto")
    assert other.best.metrics == {"acc": 0.1, "loss": 3.0}


def test_a_new_training_resets_the_hook(job):
    hook = EvaluateHook(4, Function({"acc": 0.9}, {"acc": 0.8}, {"acc": 0.1}, {"acc": 0.2}))
    evaluated(job, hook)
    evaluated(job, hook)
    assert hook.best.metrics == {"acc": 0.2}


@pytest.mark.parametrize(
    ("result", "options", "match"),
    [
        (3, {}, "int"),
        ({"acc": "high"}, {}, "'acc' is a str"),
        ({"a": {"b": torch.ones(2)}}, {}, "'a/b' is a Tensor"),
        ({"acc": 0.5}, {"monitor": "accuracy"}, r"'accuracy'.*acc"),
    ],
)
def test_a_result_that_cannot_be_used_is_an_error(job, result, options, match, logs):
    with pytest.raises((TrainingError, ConfigurationError), match=match):
        job.loop(EvaluateHook(1, Function(result), **options)).run()


@pytest.mark.parametrize("name", ["speed", "epoch"])
def test_a_first_metric_without_a_known_rule_is_a_warning(job, name, logs):
    hook = EvaluateHook(1, Function({name: 3.0}, {name: 4.0}), by_epoch=True)
    loop = job.loop(hook)
    loop.run()
    assert (loop.counters.epoch, hook.best) == (2, None)
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert 'rule="greater"' in warning["reason"]


def test_a_metric_may_be_named_like_a_field_of_the_log_line(job, logs):
    hook = EvaluateHook(1, Function({"epoch": 3.0, "event": 1.0}, {"epoch": 2.0}), by_epoch=True, rule="greater")
    job.loop(hook).run()
    assert {"epoch": 3.0, "event": 1.0} in [entry.get("metrics") for entry in logs]
