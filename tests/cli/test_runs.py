"""``trainbus runs``: choose, sort and compare, as a user would type it."""

import json
import re
from pathlib import Path

import pytest

from ..observe.folders import entry, session, write_record, write_run

SETTINGS = {
    "a": {
        "lr": 0.1,
        "optimizer": "SGD",
        "batch_size": 8,
        "hooks.EMAHook": True,
        "hooks.EMAHook.momentum": 0.1,
        "seed": None,
    },
    "b": {"lr": 0.001, "optimizer": "AdamW", "optimizer.betas": [0.9, 0.999], "batch_size": 8, "seed": 1},
    "c": {"lr": 0.02, "optimizer": "AdamW", "optimizer.betas": [0.9, 0.95], "batch_size": 8, "seed": 1},
}
LASTED = {"a": 100.0, "b": 4000.0, "c": 10.0}


@pytest.fixture
def three(here):
    """Three runs with accuracies of 0.9 (all of them), 0.91 for b and 0.92 for c."""
    for number, (name, settings) in enumerate(SETTINGS.items()):
        write_run(Path("runs", name), session(lasted=LASTED[name], settings=settings, epoch=10, iter=100))
        write_record(Path("runs", name), entry(80, "validation", 9, 90, metrics={"accuracy": 0.9 + number / 100}))


def rows(out: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in out.splitlines()]


def names(out: str) -> list[str]:
    return [row[0] for row in rows(out)[1:]]


def test_settings_that_differ_are_columns_and_those_that_are_the_same_are_not(three, trainbus):
    head, first, *_ = rows(trainbus("runs").out)
    assert head[:6] == ["run", "state", "epochs", "lr", "optimizer", "EMAHook"]  # the end of the name is enough
    assert head[-3:] == ["best", "time", "size"]
    assert first[3:6] == ["0.1", "SGD", "true"]
    assert not {"batch_size", "momentum", "python", "command"} & set(head)


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        (["lr<0.05"], "bc"),
        (["lr <= 2e-2", "optimizer=AdamW"], "bc"),
        (["optimizer!=AdamW"], "a"),
        (["EMAHook=true"], "a"),
        (["hooks.EMAHook.momentum!=0.1"], "bc"),  # those without the hook
        (["seed=none"], "a"),
        (["seed=1", "lr>0.01"], "c"),
        (["betas=0.9,0.95"], "c"),
        (["time>1h"], "b"),
        (["time<2min"], "ac"),
        (["size<1MB"], "abc"),
        (["began>2025"], "abc"),
        (["began>2026-01-01"], ""),
        (["accuracy>=0.91"], "bc"),
        (["train/loss<1"], "abc"),
        (["iterations=100"], "abc"),
    ],
    ids=str,
)
def test_runs_are_chosen_by_what_was_set_and_what_came_out(three, trainbus, conditions, left):
    options = [word for one in conditions for word in ("--where", one)]
    found = json.loads(trainbus("runs", *options, "--json").out)
    assert "".join(row["run"] for row in found) == left


def test_no_run_that_matches_is_said(three, trainbus):
    assert trainbus("runs", "--where", "lr>1").out == "none of 3 runs in runs matches lr>1\n"


@pytest.mark.parametrize(
    ("options", "order"),
    [
        (["--sort", "accuracy"], "cba"),  # the best first
        (["--sort", "accuracy", "--reverse"], "abc"),
        (["--sort", "lr"], "bca"),
        (["--sort", "lr", "--reverse"], "acb"),
        (["--sort", "train/loss"], "abc"),
        (["--sort", "momentum"], "abc"),  # those without it are last
        (["--sort", "optimizer"], "bca"),
        (["--reverse"], "cba"),
    ],
    ids=str,
)
def test_runs_are_sorted_by_a_column(three, trainbus, options, order):
    assert "".join(names(trainbus("runs", *options).out)) == order


def test_the_column_that_the_table_is_sorted_by_is_shown_in_place_of_the_best_metric(three, trainbus):
    head = rows(trainbus("runs", "--sort", "accuracy").out)[0]
    assert head[3] == "accuracy"
    assert "best" not in head


def test_columns_are_chosen_and_json_has_numbers(three, trainbus):
    head, first, *_ = rows(trainbus("runs", "--columns", "lr,betas,time").out)
    assert (head, first) == (["run", "lr", "betas", "time"], ["a", "0.1", "0:01:40"])
    found = json.loads(trainbus("runs", "--columns", "run,lr,time", "--json").out)
    assert found[0] == {"run": "a", "lr": 0.1, "time": 100.0}
    whole = json.loads(trainbus("runs", "--json").out)[0]
    assert (whole["path"], whole["hooks.EMAHook.momentum"], whole["size"] > 100) == ("runs/a", 0.1, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sort", "acuracy"], "no run has a column 'acuracy' (did you mean 'accuracy'"),
        (["--columns", "lr,optimiser"], "no run has a column 'optimiser' (did you mean 'optimizer'"),
        (["--where", "batchsize=8"], "no run has a column 'batchsize' (did you mean 'batch_size'"),
        (["--where", "xyzzy=8"], "no run has a column 'xyzzy'; trainbus runs --json shows the columns of each run"),
        (["--where", "lr"], "--where 'lr' is not a condition"),
        (["--where", "lr<"], "--where 'lr<' is not a condition"),
        (["--where", "lr<small"], "--where lr<small: the column has numbers"),
        (["--where", "time>soon"], "also with a unit (s, min, h, d)"),
    ],
    ids=str,
)
def test_mistakes_are_told_with_the_near_names(three, trainbus, options, says):
    assert says in trainbus("runs", *options, status=2).err


def test_the_end_of_several_names_is_refused_with_the_whole_ones(three, trainbus):
    write_run(Path("runs/d"), session(settings={"hooks.A.interval": 1, "hooks.B.interval": 2}))
    assert "give one of hooks.A.interval, hooks.B.interval" in trainbus("runs", "--sort", "interval", status=2).err


def test_a_damaged_run_is_told_beside_the_json(three, trainbus):
    Path("runs/e").mkdir()
    Path("runs/e/run.json").write_text("{")
    out, err = trainbus("runs", "--json", status=1)
    assert len(json.loads(out)) == 3
    assert "runs/e/run.json is damaged" in err


def test_without_runs_json_is_an_empty_list(here, trainbus):
    Path("runs").mkdir()
    assert json.loads(trainbus("runs", "--json").out) == []
    assert trainbus("runs", "--sort", "lr").out == "no runs in runs\n"


def test_columns_that_do_not_fit_a_terminal_are_named_below_it(three, trainbus, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("trainbus.cli.runs.to_terminal", lambda: Console(width=60, force_terminal=True, color_system=None))
    lines = trainbus("runs").out.splitlines()
    assert all(len(line) <= 60 for line in lines[:4])
    assert lines[0].split() == ["run", "state", "epochs", "lr", "best", "time"]
    assert "They also differ in optimizer, EMAHook" in " ".join(lines[4:])
