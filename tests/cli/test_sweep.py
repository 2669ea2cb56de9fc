"""``trainbus run CONFIG key=a,b -n 2``: all products of several values, a process and a folder each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from trainbus.cli.sweep import trainings

from ..scripts import TRAINBUS, Script
from ..waiting import until

PARTS = """
import os, time
import torch
from torch import nn

def data(batches=4):
    return [torch.ones(2, 2)] * batches

def step(model, batch):
    open(f"began-{os.getpid()}", "w").close()
    while os.path.exists("hold"):
        time.sleep(0.01)
    return model(batch).square().mean()

def net(width=3):
    if width == 13:
        raise ValueError("13 brings bad luck")
    torch.manual_seed(0)
    return nn.Linear(2, width)
"""
CONFIG = """
imports = ["parts_of_a_sweep", "torch.optim"]
model = "parts_of_a_sweep:net"
optimizer = { type = "torch.optim:SGD", lr = 0.1 }
step = "parts_of_a_sweep:step"
data.train = "parts_of_a_sweep:data"
data.val = "parts_of_a_sweep:data"
loop.max_epochs = 2
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "parts_of_a_sweep.py").write_text(PARTS)
    (tmp_path / "mine.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def begun(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Script]:
    """``begun(*words)`` starts the command."""
    return lambda *words: Script(TRAINBUS, tmp_path_factory.mktemp("printed"), cwd=here, arguments=["run", "mine.toml", *words])


@pytest.fixture
def ran(begun: Callable[..., Script]) -> Callable[..., tuple[int, str]]:
    """``ran(*words)`` runs it; returns its exit status and what it prints."""

    def run(*words: str) -> tuple[int, str]:
        done = begun(*words).wait(240)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (["optimizer.lr=0.1"], [""]),
        (["optimizer.lr=0.1,1e-2"], ["lr=0.1", "lr=1e-2"]),
        (["a.lr=1,2", "seed=7", "b.width=3, 4"], ["lr=1+width=3", "lr=1+width=4", "lr=2+width=3", "lr=2+width=4"]),
        (["betas=[0.9,0.99],[0.8, 0.9]"], ["betas=_0.9_0.99", "betas=_0.8_0.9"]),
        (["model={width=3,depth=2}"], [""]),
        (["paths=a/b,a b"], ["1+paths=a_b", "2+paths=a_b"]),
        (["name='a,b',c"], ["name=_a_b", "name=c"]),
    ],
)
def test_a_comma_outside_of_brackets_and_quotes_separates_values(changes, names):
    found = trainings(changes)
    assert [one.name for one in found] == names
    assert len({one.changes for one in found}) == len(names)


@pytest.mark.long
def test_each_product_has_a_folder_and_the_table_names_the_best(here, ran):
    status, printed = ran("optimizer.lr=0.1,0.0", "model.width=3,4", "-n", "2")
    folders = {path.name for path in (here / "runs/mine").iterdir()}
    assert folders == {f"lr={lr}+width={width}" for lr in ("0.1", "0.0") for width in (3, 4)}
    for name in folders:
        assert (here / "runs/mine" / name / "run.json").exists()
        assert "last validation" in (here / "runs/mine" / name / "output.log").read_text()
    assert (status, printed.count("finished")) == (0, 4)
    assert "best loss" in printed
    assert "lr=0.1+width" in printed.splitlines()[-1]
    assert "work_dir" not in printed


@pytest.mark.long
def test_one_that_fails_is_told_with_its_last_lines_and_the_others_go_on(here, ran):
    former = here / "runs/mine/width=3/run.json"  # of a sweep before
    former.parent.mkdir(parents=True)
    former.touch()
    status, printed = ran("model.width=3,13")
    assert status == 1
    assert printed.startswith("2 trainings, 1 at a time → runs/mine-2/")
    assert "width=13  exit status 1, see runs/mine-2/width=13/output.log" in printed
    assert "13 brings bad luck" in printed
    assert "best loss" in printed


@pytest.mark.long
def test_ctrl_c_goes_to_the_trainings_once_and_resume_goes_on(here, begun, ran):
    (here / "hold").touch()
    process = begun("optimizer.lr=0.1,0.2,0.3", "-n", "2")
    until(lambda: len([*here.glob("began-*")]) == 2)
    os.kill(process.pid, signal.SIGINT)
    (here / "hold").unlink()
    done = process.wait(240)
    assert done.returncode == 130, done
    assert {path.name for path in (here / "runs/mine").iterdir()} == {"lr=0.1", "lr=0.2"}  # no third one began
    status, printed = ran("optimizer.lr=0.1,0.2,0.3", "-n", "2", "--resume")
    assert (status, printed.count("finished")) == (0, 3), printed
    assert {path.name for path in (here / "runs").iterdir()} == {"mine"}


@pytest.mark.parametrize("word", ["--check", "--dry-run", "--print-config", "--dashboard"])
def test_what_goes_with_one_training_only_is_told(trainbus, here, monkeypatch, word):
    monkeypatch.chdir(here)
    assert "go with one training" in trainbus("run", "mine.toml", "optimizer.lr=1,2", word, status=2).err


def test_n_needs_several_values(trainbus, here, monkeypatch):
    monkeypatch.chdir(here)
    assert "an option with several values" in trainbus("run", "mine.toml", "-n", "2", status=2).err
    assert not (here / "runs").exists()
