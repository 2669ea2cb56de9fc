"""``trainbus init``: what it writes trains."""

import re

import pytest

from eventloop.checkpoint import verify
from eventloop.cli import main

from ..scripts import run_script

BEGIN = "import os, sys; os.chdir({!r}); sys.path.insert(0, '.'); more = {}"
RUN = {
    "train.py": "import runpy; sys.argv = ['train.py', *more]; runpy.run_path('train.py', run_name='__main__')",
    "mine.toml": "from eventloop.cli import main; sys.exit(main(['run', 'mine.toml', *more]))",
}


@pytest.mark.parametrize("name", RUN)
def test_what_is_written_trains_and_resumes(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {name} and parts.py")
    for more in ([], ["--resume"]):
        done = run_script(f"{BEGIN.format(str(tmp_path), more)}; {RUN[name]}", tmp_path)
        assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "run.json").exists()
    assert len(list(run.glob("epoch_*.safetensors"))) == 3
    verify(run / "epoch_20.safetensors")


def test_a_script_and_a_configuration_of_one_name_are_two_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {}
    for name, run in (("train.py", RUN["train.py"]), ("train.toml", RUN["mine.toml"].replace("mine", "train"))):
        assert main(["init", name]) == 0
        done = run_script(f"{BEGIN.format(str(tmp_path), [])}; {run}", tmp_path)
        assert done.returncode == 0, done.stderr
        before = before or {path.name: path.read_bytes() for path in (tmp_path / "runs" / "train").iterdir()}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["train", "train-2"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "runs" / "train").iterdir()} == before


def test_the_length_of_a_written_training_stands_in_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, length in (("train.py", r"\b20\b"), ("mine.toml", r"(?<!loop\.)\b20\b")):
        assert main(["init", name]) == 0
        assert len(re.findall(length, (tmp_path / name).read_text())) == 1


@pytest.mark.parametrize("there", ["train.py", "parts.py"])
def test_nothing_is_overwritten(tmp_path, capsys, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    (tmp_path / there).write_text("mine")
    assert main(["init"]) == 2
    assert f"{there}: exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]


def test_a_script_and_a_configuration_share_their_parts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "train.py"]) == 0
    assert main(["init", "train.toml"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.py", "train.py", "train.toml"]
    (tmp_path / "parts.py").write_text("mine")
    assert main(["init", "other.py"]) == 2
    assert "parts.py: exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.yaml", "train", "parts.py"])
def test_another_name_is_an_error(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 2
    assert f"{name}: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
