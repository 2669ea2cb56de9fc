"""Hooks that go by metrics of validations, in a training without any, and in one whose validations lack the metric."""

import pytest
import torch
from structlog.testing import capture_logs
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop import Bus, ConfigurationError, TrainingError
from hooks.checkpoint import CheckpointHook
from hooks.early_stopping import EarlyStoppingHook
from hooks.schedule import ParamSchedulerHook

from .conftest import own_loop

HOOKS = {
    "EarlyStoppingHook": lambda optimizer, metric="loss": EarlyStoppingHook(metric, patience=1),
    "CheckpointHook(save_best=...)": lambda optimizer, metric="loss": CheckpointHook(save_best=metric, save_last=False),
    'ParamSchedulerHook(by="metric")': lambda optimizer, metric="loss": ParamSchedulerHook(
        ReduceLROnPlateau(optimizer), by="metric", monitor=metric
    ),
}


@pytest.fixture(params=list(HOOKS))
def label(request):
    return str(request.param)


@pytest.fixture
def parts(job, label):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, HOOKS[label](optimizer)


def test_a_loop_without_validation_data_is_an_error_before_its_first_iteration(job, parts, label, tmp_path):
    model, optimizer, hook = parts
    loop = job.loop(hook, model=model, optimizer=optimizer, work_dir=tmp_path)
    with pytest.raises(ConfigurationError) as caught, capture_logs():
        loop.run()
    assert str(caught.value).startswith(f"{label} needs a metric of validations")
    assert "val_data" in str(caught.value)
    assert loop.counters.iter == 0


@pytest.mark.parametrize("validates", [True, False])
def test_a_users_own_loop_without_validations_is_warned_of_at_its_end(job, parts, label, tmp_path, validates):
    model, optimizer, hook = parts
    bus = Bus(hook)
    with capture_logs() as logs:
        own_loop(bus, model, optimizer, train=1, val=int(validates), work_dir=tmp_path)
    told = [entry["event"] for entry in logs if "had none" in entry["event"]]
    assert [one.startswith(label) for one in told] == ([] if validates else [True])


def test_one_that_is_stopped_before_its_first_validation_is_not(job, parts, tmp_path):
    model, optimizer, hook = parts
    bus = Bus(hook, job.StopAfter(1))
    with capture_logs() as logs:
        own_loop(bus, model, optimizer, train=2, work_dir=tmp_path)
    assert not [entry for entry in logs if "had none" in entry["event"]]


def test_a_resumed_run_that_has_nothing_left_to_train_is_not(job, label, tmp_path):
    for _ in range(2):
        model = job.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        bus = Bus(CheckpointHook(name="at the end"), HOOKS[label](optimizer))
        with capture_logs() as logs:
            own_loop(bus, model, optimizer, train=1, val=1, work_dir=tmp_path, resume="auto")
    assert any("nothing is left" in entry["event"] for entry in logs)
    assert not [entry for entry in logs if "had none" in entry["event"]]


@pytest.mark.parametrize(
    ("metric", "meant", "sanity"), [("eval_loss", "'loss'", 2), ("acccuracy", "'accuracy'", 1), ("val/loss", "'loss'", 0)]
)
def test_a_metric_that_validations_lack_is_an_error_with_the_nearest_before_the_training(
    job, label, tmp_path, metric, meant, sanity
):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = {"val_data": job.batches(1), "metrics": {"accuracy": job.Scores(0.5, 0.5)}, "sanity": sanity}
    loop = job.loop(HOOKS[label](optimizer, metric), model=model, optimizer=optimizer, work_dir=tmp_path, max_epochs=2, **data)
    with pytest.raises(ConfigurationError if sanity else TrainingError) as caught, capture_logs():
        loop.run()
    assert label.split("(")[0] in str(caught.value) or "save_best" in str(caught.value)
    assert f"{metric!r}" in str(caught.value)
    assert f"did you mean {meant}?" in str(caught.value)
    assert loop.counters.epoch == (0 if sanity else 1)
    assert sanity == 0 or loop.counters.iter == 0


def test_a_metric_that_is_none_in_a_validation_is_skipped_with_a_warning(job, label, tmp_path):
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = {"val_data": job.batches(1), "metrics": {"accuracy": job.Scores(None, 0.5)}}
    hook = HOOKS[label](optimizer, "accuracy")
    loop = job.loop(hook, model=model, optimizer=optimizer, work_dir=tmp_path, max_epochs=2, **data)
    with capture_logs() as logs:
        loop.run()
    assert loop.counters.epoch == 2
    assert len([entry for entry in logs if "'accuracy'" in entry["event"] and entry["log_level"] == "warning"]) == 1
