"""``trainbus init``: what it writes trains."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from trainbus.cli import main
from trainbus.eventloop.checkpoint import verify


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("parts", None)


def train(name: str, *words: str) -> None:
    """Run a written script or configuration, of three epochs."""
    path = Path(name)
    path.write_text(path.read_text().replace("20", "3"))
    if path.suffix == ".py":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *words])
            runpy.run_path(name, run_name="__main__")
    else:
        assert main(["run", name, *words]) == 0


def test_what_is_written_shares_its_parts_trains_and_resumes_and_one_name_gives_two_runs(here, trainbus):
    for name in ("train.py", "train.toml"):
        assert trainbus("init", name).out.startswith(f"wrote {name} and parts.py" if name == "train.py" else f"wrote {name}")
    assert sorted(path.name for path in here.iterdir()) == ["parts.py", "train.py", "train.toml"]
    train("train.py")
    first = {path.name: path.read_bytes() for path in (here / "runs/train").iterdir()}
    train("train.toml")
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["train", "train-2"]
    assert {path.name: path.read_bytes() for path in (here / "runs/train").iterdir()} == first
    for name in ("train.py", "train.toml"):
        train(name, "--resume")
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["train", "train-2"]
    for run in (here / "runs").iterdir():
        assert (run / "run.json").exists()
        verify(run / "epoch_3.safetensors")


def test_the_length_of_a_written_training_stands_in_one_place(trainbus, here):
    for name, length in (("train.py", r"\b20\b"), ("mine.toml", r"(?<!loop\.)\b20\b")):
        trainbus("init", name)
        assert len(re.findall(length, (here / name).read_text())) == 1


@pytest.mark.parametrize(
    ("there", "arguments", "says"),
    [
        (["train.py"], [], "train.py: exists already"),
        (["parts.py"], [], "parts.py: exists already"),
        *(([], [name], f"{name}: ") for name in ("train.yaml", "train", "parts.py")),
    ],
)
def test_nothing_is_overwritten_and_another_name_is_an_error(here, trainbus, there, arguments, says):
    for name in there:
        (here / name).write_text("mine")
    assert says in trainbus("init", *arguments, status=2).err
    assert [path.name for path in here.iterdir()] == there
