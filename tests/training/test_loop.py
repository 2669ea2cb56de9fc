"""Options of a TrainLoop that cannot work, and what it needs."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from eventloop import Bus, ConfigurationError, TrainLoop
from hooks import CheckpointHook


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": None}, "training has no length"),
        ({"max_epochs": 1, "max_iters": 1}, "give one of them"),
        ({"max_epochs": "3"}, "max_epochs='3': give an integer of at least 1"),
        ({"val_interval": "3"}, "val_interval='3': give an integer of at least 1"),
        ({"metrics": ["acc"]}, r"metrics=\['acc'\]: give a mapping of names to metrics"),
        ({"stateful": [3]}, r"stateful=\[3\]: give a mapping of names to objects"),
        ({"config": "x"}, "config='x': give a mapping"),
        ({"name": 3}, "name=3: give a text"),
        ({"work_dir": 3}, "work_dir=3: give a text, or a Path"),
        ({"train_data": 3}, "train_data=3: give an iterable of batches, such as a DataLoader"),
        ({"step": lambda x: x}, r"step\(x\) cannot be called as step\(model, batch\): too many"),
        ({"val_step": lambda model, batch, more: 0}, r"val_step\(model, batch, more\) cannot be called .* argument: 'more'"),
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"max_epochs": True}, "max_epochs=True"),
        ({"max_iters": 0}, "max_iters=0"),
        ({"max_iters": 1.5}, "max_iters=1.5"),
        ({"val_interval": 0}, "val_interval=0"),
        ({"val_begin": 0}, "val_begin=0"),
        ({"step": 3}, "step=3"),
        ({"val_step": "x"}, "val_step='x'"),
        ({"optimizer": "adam"}, "optimizer='adam': give an Optimizer, or a mapping of names to them"),
        ({"optimizer": {"a": 1}}, "optimizer 'a' is of type int, not a torch.optim"),
        ({"stateful": {"x": object()}}, r"stateful\['x'\] \(object\) has no state_dict"),
    ],
)
def test_an_option_that_cannot_work_is_an_error_when_the_loop_is_made(parts, options, message):
    with pytest.raises(ConfigurationError, match=message):
        parts.loop(**options)


@pytest.mark.parametrize(
    ("model", "message"), [(3, "model=3: give a Module"), (torch.nn.Linear, "model=<class"), ({}, "at least one model")]
)
def test_a_model_that_is_none_is_an_error(parts, model, message):
    with pytest.raises(ConfigurationError, match=message):
        TrainLoop(model, step=parts.step)


def test_training_needs_data_and_an_optimizer(parts):
    with pytest.raises(ConfigurationError, match="no train_data"):
        parts.loop(train_data=None).run()
    with pytest.raises(ConfigurationError, match="optimizer"):
        parts.loop(optimizer=None).run()


def test_val_and_test_need_only_data(parts):
    loop = TrainLoop(parts.model(), step=parts.step, val_data=parts.batches(1), test_data=parts.batches(1))
    assert loop.val().keys() == loop.test().keys() == {"loss"}
    empty = TrainLoop(parts.model(), step=parts.step)
    with pytest.raises(ConfigurationError, match="no val_data"):
        empty.val()
    with pytest.raises(ConfigurationError, match="no test_data"):
        empty.test()


def test_runs_with_the_same_seed_are_equal(parts):
    def weights():
        model = parts.model(dropout=0.5)
        torch.seed()
        parts.loop(model=model, seed=5, val_data=None).run()
        return dict(model.state_dict())

    parts.assert_same(weights(), weights())


def test_val_step_and_test_step_are_used_where_they_are_given(parts):
    loop = parts.loop(val_step=lambda m, b: {"v": 1.0}, test_step=lambda m, b: {"t": 2.0}, test_data=parts.batches(1))
    assert loop.val() == {"v": 1.0}
    assert loop.test() == {"t": 2.0}


@pytest.mark.parametrize(("option", "value"), [("step", None), ("seed", "7"), ("seed", True)])
def test_an_invalid_step_or_seed_is_an_error_at_construction(parts, bus, option, value):
    with pytest.raises(ConfigurationError, match=f"{option}={value!r}: give"):
        parts.loop(bus, **{option: value})


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_iters": 4}])
def test_a_run_with_nothing_left_to_train_logs_it(parts, tmp_path, limit):
    loop = parts.loop(**limit)
    loop.run()
    with capture_logs() as logs:
        assert loop.run() == {}
    (told,) = [entry["event"] for entry in logs if "nothing is left to train" in entry["event"]]
    ((name, value),) = limit.items()
    assert f"reached {name}={value}" in told


def test_a_resume_of_a_finished_training_that_only_validates_again_logs_that_nothing_is_left(parts, tmp_path):
    for again in (False, True):
        loop = parts.loop(Bus(CheckpointHook(interval=1)), max_epochs=2, val_data=parts.batches(1), work_dir=tmp_path)
        with capture_logs() as logs:
            loop.run(resume="auto")
        assert any("nothing is left to train" in entry["event"] for entry in logs) == again


def test_a_run_that_trains_does_not_log_that_nothing_is_left(parts):
    with capture_logs() as logs:
        parts.loop().run()
    assert not logs
