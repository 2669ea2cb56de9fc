"""When EarlyStoppingHook ends a training, and how a resumed one goes on waiting."""

import pytest
import torch

from trainbus.eventloop import ConfigurationError, TrainingError
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, EarlyStoppingHook

NAN, INF = float("nan"), float("inf")


def training(job, hook, scores, *more, **options):
    """A training of at most as many epochs as there are scores, one validated each."""
    options.setdefault("max_epochs", len(scores))
    name = options.pop("metric", hook.monitor)
    return job.loop(hook, *more, val_data=job.batches(1), metrics={name: job.Scores(*scores)}, **options)


@pytest.mark.parametrize(
    ("options", "scores", "epochs"),
    [
        # Only more than min_delta is an improvement, in the right direction.
        ({"patience": 2, "min_delta": 0.25}, [0.0, 0.25, 0.25, 9, 9], 3),
        ({"patience": 2, "min_delta": 0.25}, [0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 9], 6),
        ({"patience": 2, "min_delta": 0.25, "rule": "less"}, [1.0, 0.75, 0.75, 0, 0], 3),
        ({"patience": 1, "min_delta": 0}, [1.0, 1.0, 1.0], 2),
        # A value that creeps is compared with the best one, not with the one before.
        ({"patience": 3, "min_delta": 0.25}, [0.0, 0.2, 0.4, 0.5, 0.6, 0.6, 0.6, 9], 6),
        ({}, [0.5] * 9, 6),
        ({"patience": 1}, [0.0, 1.0, 2.0, 3.0], 4),  # more is better, by its name
        ({"stopping_threshold": 0.5}, [0.1, 0.5, 0.51, 0.9], 3),
        ({"stopping_threshold": 0.5, "rule": "less"}, [0.9, 0.5, 0.4, 0.1], 3),
        ({}, [0.1, NAN, 0.3], 2),
        ({}, [0.1, -INF, 0.3], 2),
        ({"check_finite": False, "patience": 2}, [0.1, NAN, 0.5, NAN, NAN, 1.0], 5),
        ({"check_finite": False, "patience": 2}, [NAN, NAN, 1.0], 2),
        ({"patience": 2}, [0.5, None, None, 0.5, 0.5, 0.5], 5),  # None is skipped
    ],
)
def test_epochs_until_it_stops(job, options, scores, epochs):
    loop = training(job, EarlyStoppingHook("accuracy", **options), scores)
    loop.run()
    assert loop.counters.epoch == epochs


def test_a_stop_is_clean_and_logs_the_reason(job, tmp_path):
    hook = EarlyStoppingHook("accuracy", patience=1)
    loop = training(job, hook, [0.5] * 4, CheckpointHook(interval=-1, save_best="accuracy"), work_dir=tmp_path)
    seen: list[str] = []
    reasons: list[str] = []
    for point in ("after_val_epoch", "after_val", "after_train", "after_run"):
        loop.bus.on(point, lambda event: seen.append(event.mount_point), priority=100)
    loop.bus.on("after_run", lambda event: reasons.append(event.run.info["stop_reason"]))
    loop.run()
    assert seen == ["after_val_epoch", "after_val"] * 2 + ["after_train", "after_run"]
    assert "EarlyStoppingHook: accuracy did not improve over 0.5 in 1 validations" in reasons
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == {"epoch_2", "best_accuracy_epoch_1"}


@pytest.mark.parametrize(
    ("options", "scores", "advice"),
    [
        ({"patience": 2}, [0.5] * 4, "more than patience=2"),
        ({"stopping_threshold": 0.4}, [0.1, 0.5, 0.5], "another stopping_threshold"),
        ({}, [0.1, NAN, 0.3], "a checkpoint before that"),
    ],
)
def test_a_stop_does_not_advise_to_resume_as_is(job, tmp_path, options, scores, advice, logs):
    def told():
        return [one["event"] for one in logs if one["event"].startswith("the run was stopped")]

    for resume in (None, "auto"):  # the advice holds: the resumed run stops at once
        hook = EarlyStoppingHook("accuracy", **options)
        loop = training(job, hook, scores, CheckpointHook(1), work_dir=tmp_path)
        loop.bus.on("before_train", lambda event: event.run.stop("mine") if event.progress.iter else None, priority=0)
        loop.bus.on("after_val", lambda event: event.run.stop("mine") if event.run.state.stops else None, priority=100)
        loop.run(resume=resume)
        assert loop.counters.epoch < len(scores)
        assert 'resume="auto"' not in told()[-1]
        assert advice in told()[-1]
    assert len(told()) == 2


def test_a_stop_at_the_end_of_the_training_gives_no_advice(job, tmp_path, logs):
    training(job, EarlyStoppingHook("accuracy", patience=2), [0.5] * 3, CheckpointHook(1), work_dir=tmp_path).run()
    assert not [one for one in logs if "the run was stopped" in one["event"]]


@pytest.mark.parametrize(("point", "waited"), [("after_train_epoch", 1), ("after_val_epoch", 2)])
def test_the_wait_count_is_in_the_checkpoint(job, tmp_path, point, waited, logs):
    """It does not begin at 0 again: a resumed training ends as one that was never interrupted."""
    straight = training(job, EarlyStoppingHook("accuracy", patience=3), [0.5] * 9)
    straight.run()
    assert straight.counters.epoch == 4

    first = training(job, EarlyStoppingHook("accuracy", patience=3), [0.5] * 9, work_dir=tmp_path)
    first.bus.on(point, lambda event: event.run.checkpoints.save(), once=3)
    first.bus.on("after_val", lambda event: (event.run.checkpoints.wait(), 1 / 0), once=3)
    with pytest.raises(ZeroDivisionError):
        first.run()

    hook, counts = EarlyStoppingHook("accuracy", patience=3), []
    second = training(job, hook, [0.5] * 9, work_dir=tmp_path)
    second.bus.on("before_train", lambda event: counts.append(hook.wait_count))
    second.run(resume="auto")
    assert counts == [waited]
    assert hook.best_score == 0.5
    assert second.counters.epoch == 4
    assert job.same(job.weights(second.model), job.weights(straight.model))


@pytest.mark.parametrize(("patience", "epochs"), [(2, 3), (4, 5)])
def test_a_stopped_training_remains_stopped_after_resuming_unless_with_more_patience(job, tmp_path, patience, epochs):
    first = training(job, EarlyStoppingHook("accuracy", patience=2), [0.5] * 9, CheckpointHook(1), work_dir=tmp_path)
    first.run()
    assert first.counters.epoch == 3
    final = load(tmp_path / (tmp_path / "last_checkpoint").read_text().strip())
    again = training(job, EarlyStoppingHook("accuracy", patience=patience), [0.5] * 9, CheckpointHook(1), work_dir=tmp_path)
    again.run(resume="auto")
    assert again.counters.epoch == epochs
    assert torch.equal(final["state_dict"]["0.weight"], again.model.state_dict()["0.weight"]) is (epochs == 3)


def test_a_new_training_resets_the_hook_and_validations_outside_of_one_do_not_count(job):
    hook = EarlyStoppingHook("accuracy", patience=2)
    for max_epochs, ends in ((9, 3), (9, 3), (2, 2)):
        loop = training(job, hook, [0.5] * 9, max_epochs=max_epochs)
        loop.run()
        assert loop.counters.epoch == ends
    loop.validate()
    assert hook.wait_count == 1


def test_without_strict_a_missing_metric_is_a_warning(job, logs):
    loop = training(job, EarlyStoppingHook("accuracy", patience=1, strict=False), [0.5] * 2, metric="acc_of_it")
    loop.run()
    assert loop.counters.epoch == 2
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert len(warnings) == 2
    assert "'accuracy'" in warnings[0]
    assert "'acc_of_it'" in warnings[0]


@pytest.mark.parametrize(("sanity", "error"), [(2, ConfigurationError), (0, TrainingError)])
def test_a_non_numeric_value_is_an_error_before_the_training_if_it_can_be_seen(job, sanity, error, logs):
    loop = training(job, EarlyStoppingHook("accuracy"), ["much"], sanity=sanity)
    with pytest.raises(error, match=r"accuracy.*str"):
        loop.run()
    assert bool(loop.counters.iter) is not bool(sanity)
