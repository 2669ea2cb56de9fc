"""Options of a TrainLoop that cannot work, and what it needs."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from eventloop import Bus, ConfigurationError, TrainLoop
from hooks import CheckpointHook


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"max_epochs": None}, "max_epochs"),
        ({"max_epochs": 1, "max_iters": 1}, "max_iters"),
        *(({"max_epochs": value}, f"max_epochs={value!r}") for value in ("3", 0, -1, True)),
        *(({"max_iters": value}, f"max_iters={value!r}") for value in (0, 1.5)),
        *(({"val_interval": value}, f"val_interval={value!r}") for value in ("3", 0)),
        *(({name: value}, f"{name}={value!r}") for name, value in (("val_begin", 0), ("step", 3), ("step", None))),
        *(({name: value}, f"{name}={value!r}") for name, value in (("val_step", "x"), ("config", "x"), ("name", 3))),
        *(({name: value}, f"{name}={value!r}") for name, value in (("work_dir", 3), ("seed", "7"), ("seed", True))),
        *(({name: 5}, f"{name}=5") for name in ("train_data", "val_data", "test_data")),
        ({"device": "gpu"}, "device='gpu'"),
        ({"metrics": ["acc"]}, r"metrics=\['acc'\]"),
        *(({"metrics": {"x": metric}}, "'x'") for metric in (object(), {"a": 1})),
        ({"stateful": [3]}, r"stateful=\[3\]"),
        ({"stateful": {"x": object()}}, r"stateful\['x'\] \(object\)"),
        ({"step": lambda x: x}, r"step\(x\).*step\(model, batch\)"),
        ({"val_step": lambda model, batch, more: 0}, r"val_step\(model, batch, more\).*'more'"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"optimizer": {"a": 1}}, "'a'.*int"),
        ({"model": 3, "optimizer": None}, "model=3"),
        ({"model": torch.nn.Linear, "optimizer": None}, "model=<class"),
    ],
)
def test_an_option_that_cannot_work_is_an_error_when_the_loop_is_made(parts, options, value):
    with pytest.raises(ConfigurationError, match=value):
        parts.loop(**options)


def test_training_needs_data_an_optimizer_and_a_model_val_and_test_only_data_and_a_model(parts):
    for option, value in (("train_data", None), ("optimizer", None)):
        with pytest.raises(ConfigurationError, match=option):
            parts.loop(**{option: value}).run()
    with pytest.raises(ConfigurationError, match="model"):
        TrainLoop({}, step=parts.step)
    loop = TrainLoop(parts.model(), step=parts.step, val_data=parts.batches(1), test_data=parts.batches(1))
    assert loop.val().keys() == loop.test().keys() == {"loss"}
    empty = TrainLoop(parts.model(), step=parts.step)
    with pytest.raises(ConfigurationError, match="val_data"):
        empty.val()
    with pytest.raises(ConfigurationError, match="test_data"):
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


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_iters": 4}])
def test_a_run_with_nothing_left_to_train_logs_it(parts, bus, trace, limit):
    loop = parts.loop(bus, **limit)
    with capture_logs() as logs:
        loop.run()
    assert not logs
    trace.events.clear()
    with capture_logs() as logs:
        assert loop.run() == {}
    assert trace.names == ["before_run", "after_run"]
    (told,) = [entry["event"] for entry in logs if "nothing is left to train" in entry["event"]]
    ((name, value),) = limit.items()
    assert f"reached {name}={value}" in told


def test_a_resume_of_a_finished_training_that_only_validates_again_logs_that_nothing_is_left(parts, tmp_path):
    for again in (False, True):
        loop = parts.loop(Bus(CheckpointHook(interval=1)), max_epochs=2, val_data=parts.batches(1), work_dir=tmp_path)
        with capture_logs() as logs:
            loop.run(resume="auto")
        assert any("nothing is left to train" in entry["event"] for entry in logs) == again
