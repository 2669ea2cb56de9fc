"""Hooks that go by metrics of validations, in a training without any, and in one whose validations lack the metric."""

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainbus.eventloop import Bus, ConfigurationError, TrainingError
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, ParamSchedulerHook

from ..failing import said
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
def train(job, label):
    """``train(*hooks, own=..., metric=...)`` runs a loop of ours or one's own with a hook that goes by a metric."""

    def run(*more, own, metric="loss", **options):
        model = job.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        hooks = (HOOKS[label](optimizer, metric), *more)
        if own:
            return own_loop(Bus(*hooks), model, optimizer, **options)
        loops.append(job.loop(*hooks, model=model, optimizer=optimizer, **options))
        return loops[-1].run()

    loops = run.loops = []
    return run


def test_a_loop_without_validation_data_is_an_error_before_its_first_iteration(train, label, tmp_path, logs):
    told = said(train, own=False, work_dir=tmp_path)
    assert told.startswith(f"{label} needs a metric of validations")
    assert "val_data" in told
    assert train.loops[0].counters.iter == 0


@pytest.mark.parametrize("validates", [True, False])
def test_a_users_own_loop_without_validations_is_warned_of_at_its_end(train, label, tmp_path, validates, logs):
    train(own=True, train=1, val=int(validates), work_dir=tmp_path)
    told = [entry["event"] for entry in logs if entry.get("id") == "no-validation"]
    assert [one.startswith(label) for one in told] == ([] if validates else [True])


def test_one_that_is_stopped_before_its_first_validation_is_not(job, train, tmp_path, logs):
    train(job.StopAfter(1), own=True, train=2, work_dir=tmp_path)
    assert not [entry for entry in logs if entry.get("id") == "no-validation"]


def test_a_resumed_run_that_has_nothing_left_to_train_is_not(train, tmp_path, logs):
    for _ in range(2):
        train(CheckpointHook(name="at the end"), own=True, train=1, val=1, work_dir=tmp_path, resume="auto")
    assert any("nothing is left" in entry["event"] for entry in logs)
    assert not [entry for entry in logs if entry.get("id") == "no-validation"]


@pytest.mark.parametrize(
    ("metric", "meant", "sanity"), [("eval_loss", "'loss'", 2), ("acccuracy", "'accuracy'", 1), ("val/loss", "'loss'", 0)]
)
def test_a_metric_that_validations_lack_is_an_error_before_training(job, train, label, tmp_path, metric, meant, sanity, logs):
    data = {"val_data": job.batches(1), "metrics": {"accuracy": job.Scores(0.5, 0.5)}, "sanity": sanity}
    error = ConfigurationError if sanity else TrainingError
    told = said(train, own=False, error=error, metric=metric, work_dir=tmp_path, max_epochs=2, **data)
    assert label.split("(")[0] in told or "save_best" in told
    assert f"{metric!r}" in told
    assert f"did you mean {meant}?" in told
    assert train.loops[0].counters.epoch == (0 if sanity else 1)
    assert sanity == 0 or train.loops[0].counters.iter == 0


def test_a_metric_that_is_none_in_a_validation_is_skipped_with_a_warning(job, train, tmp_path, logs):
    data = {"val_data": job.batches(1), "metrics": {"accuracy": job.Scores(None, 0.5)}}
    train(own=False, metric="accuracy", work_dir=tmp_path, max_epochs=2, **data)
    assert train.loops[0].counters.epoch == 2
    assert len([entry for entry in logs if "'accuracy'" in entry["event"] and entry["log_level"] == "warning"]) == 1
