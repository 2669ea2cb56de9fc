from trainbus.observe import RunFolder
from trainbus.observe.compared import differing, metrics_of, settings_of

from .folders import entry, session, write_record, write_run


def test_facts_that_differ_are_named_in_their_order_and_equal_columns_once():
    rows = [{"lr": 0.1, "seed": 1, "same": True, "rate": 0.1}, {"lr": 0.2, "seed": 1, "same": True, "rate": 0.2}]
    assert differing(rows) == ["lr"]
    assert differing([*rows, {"lr": 0.2, "same": True, "rate": 0.2}]) == ["lr", "seed"]


def test_the_options_of_a_hook_that_some_runs_lack_are_named_only_where_they_differ():
    ema = {"hooks.EMA": True, "hooks.EMA.momentum": 0.1, "hooks.EMA.interval": 1}
    assert differing([ema, {"lr": 1}, ema | {"lr": 1}]) == ["hooks.EMA", "lr"]
    assert differing([ema, {}, ema | {"hooks.EMA.interval": 2}]) == ["hooks.EMA.interval"]  # {} has no settings at all
    assert differing([ema, {"lr": 1}, ema | {"hooks.EMA.interval": 2}]) == ["hooks.EMA", "hooks.EMA.interval", "lr"]


def test_settings_are_those_of_the_last_session_and_a_key_of_config_has_another_name_only_if_it_says_something_else(tmp_path):
    sessions = session(settings={"lr": 0.1, "seed": 1}), session(settings={"lr": 0.2, "batch_size": 8})
    config = {"lr": 0.5, "batch_size": 8, "model": {"depth": 3}}
    story = RunFolder(write_run(tmp_path, *sessions, config=config)).story()
    found = settings_of(story)
    assert found | {"lr": 0.2, "config.lr": 0.5, "batch_size": 8, "model.depth": 3, "torch": "2.11.0", "changed": True} == found
    assert not {"seed", "config.batch_size"} & found.keys()


def test_metrics_are_the_best_of_the_validations_and_the_last_of_the_test_and_the_training(tmp_path):
    run = RunFolder(write_run(tmp_path))
    write_record(tmp_path, entry(80, "validation", 9, 90, metrics={"accuracy": float("nan"), "speed": 3.0}))
    metrics = metrics_of(run, run.story(), {"accuracy": "greater"})
    assert metrics == {"accuracy": 0.9, "speed": 3.0, "test/accuracy": 0.85, "train/loss": 0.01}
