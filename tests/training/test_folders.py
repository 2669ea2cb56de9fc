"""The folder of a run: each run has its own."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, ConfigurationError, Hook, Run, platform
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, LoggerHook
from trainbus.hooks.writers import CSVWriter, JSONLinesWriter, TensorBoardWriter
from trainbus.observe import TraceHook

from . import conftest as parts


def make_loop(work_dir, epochs=2, hooks=None):
    bus, data = Bus(*(hooks or [CheckpointHook(1)])), parts.batches(1)
    return parts.loop(bus, train_data=data, val_data=data, max_epochs=epochs, work_dir=work_dir)


def own_loop(work_dir):
    model = parts.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(Bus(CheckpointHook(1)), model=model, optimizer=optimizer, work_dir=work_dir) as run:
        parts.train(run, parts.batches(1), epochs=2)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("training", [lambda folder: make_loop(folder).run(), own_loop], ids=["TrainLoop", "Run"])
def test_a_training_in_a_folder_that_has_a_run_gets_one_of_its_own_and_says_so_first(tmp_path, training):
    first = tmp_path / "first"
    training(first)
    before = content(first)
    with capture_logs() as logs:
        training(first)
    assert logs[0]["work_dir"] == str(tmp_path / "first-2")
    training(first)
    assert content(first) == before
    assert {path.name for path in tmp_path.iterdir()} == {"first", "first-2", "first-3"}
    assert content(tmp_path / "first-3").keys() == before.keys()


def test_auto_goes_on_with_the_run_of_the_highest_number(tmp_path):
    for _ in range(2):
        make_loop(tmp_path / "first").run()
    make_loop(tmp_path / "first-10").run()
    make_loop(tmp_path / "first-other").run()
    make_loop(tmp_path / "first", 3).run(resume="auto")
    assert load(tmp_path / "first-10" / "epoch_3.safetensors")["progress"]["iter"] == 3
    assert not list(tmp_path.glob("*/epoch_4.safetensors"))
    assert not (tmp_path / "first" / "epoch_3.safetensors").exists()


@pytest.mark.skipif(platform.NOT_IN_NAMES == "/", reason="this system has all such names")
@pytest.mark.parametrize("name", ["10:14:29", "ends with a dot."])
def test_a_folder_that_the_system_cannot_have_is_refused_at_the_first_update(tmp_path, name):
    with pytest.raises(ConfigurationError, match=f"no files named '{name}'; rename it"):
        make_loop(tmp_path / name / "run").run()


def test_other_files_in_the_folder_are_no_run(tmp_path):
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    make_loop(tmp_path).run()
    assert (tmp_path / "epoch_2.safetensors").exists()


def test_later_runs_of_one_loop_and_an_explicit_resume_stay_in_its_folder(tmp_path):
    first = tmp_path / "first"
    loop = make_loop(first)
    loop.validate()
    loop.run()
    loop.max_epochs = 3
    loop.run()
    loop.validate()
    assert (first / "epoch_3.safetensors").exists()
    make_loop(first, 4).run(resume=first / "epoch_3.safetensors")
    assert (first / "epoch_4.safetensors").exists()
    make_loop(first).validate()
    assert {path.name for path in tmp_path.iterdir()} == {"first"}


def test_a_run_in_the_current_folder_has_its_successors_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        make_loop(".").run()
    assert (tmp_path / "run-2" / "epoch_2.safetensors").exists()
    make_loop(".", 3).run(resume="auto")
    assert (tmp_path / "run-2" / "epoch_3.safetensors").exists()


HOOKS = {
    "jsonl": lambda: LoggerHook(writers=[JSONLinesWriter("mine.jsonl")]),
    "csv": lambda: LoggerHook(writers=[CSVWriter("mine.csv")]),
    "tensorboard": lambda: LoggerHook(writers=[TensorBoardWriter("events")]),
    "trace": lambda: TraceHook(first=0, iterations=1),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_file_that_only_one_hook_writes_tells_a_run(tmp_path, hook):
    make_loop(tmp_path / "first", hooks=[HOOKS[hook]()]).run()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    make_loop(tmp_path / "first", hooks=[HOOKS[hook]()]).run()
    assert {path.name for path in tmp_path.iterdir()} == {"first", "first-2"}
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_directory_of_checkpoints_without_a_work_dir_gets_a_number(tmp_path, logs):
    out = tmp_path / "out"
    make_loop(None, hooks=[CheckpointHook(1, out_dir=out)]).run()
    before = content(out)
    make_loop(None, hooks=[CheckpointHook(1, out_dir=out)]).run()
    assert [one["directory"] for one in logs if "directory" in one] == [str(tmp_path / "out-2")]
    assert content(out) == before
    assert content(tmp_path / "out-2").keys() == before.keys()
    make_loop(None, 3, hooks=[CheckpointHook(1, out_dir=out)]).run(resume=out / "epoch_2.safetensors")
    assert (out / "epoch_3.safetensors").exists()


def test_work_dirs_of_one_name_have_two_directories_of_checkpoints(tmp_path):
    def training(name, epochs=1, **options):
        make_loop(tmp_path / name / "run", epochs, hooks=[CheckpointHook(1, out_dir=tmp_path / "out")]).run(**options)

    training("x")
    before = content(tmp_path / "out" / "run")
    training("y")
    assert content(tmp_path / "out" / "run") == before
    assert (tmp_path / "y" / "run-2" / "last_checkpoint").exists()
    training("y", 2, resume="auto")
    assert (tmp_path / "out" / "run-2" / "epoch_2.safetensors").exists()
    assert content(tmp_path / "out" / "run") == before


class Cluster(Hook):
    """A hook of a cluster that has a folder for each job."""

    def __init__(self, folder):
        self.folder = folder

    def default_work_dir(self):
        return self.folder

    def before_run(self, event):
        pass


def test_a_hook_gives_a_work_dir_to_a_run_that_has_none_and_the_run_stays_in_it(tmp_path):
    """The cluster looks for files there, and other jobs have similar names."""
    job, hooks = tmp_path / "job", lambda: [CheckpointHook(1), Cluster(tmp_path / "job")]
    for place in (job, tmp_path / "job-2"):
        make_loop(place, epochs=1).run()
    make_loop(None, epochs=2, hooks=hooks()).run(resume="auto")
    assert content(tmp_path / "job-2").keys() == {"epoch_1.safetensors", "last_checkpoint", "scores.json"}
    assert {"epoch_1.safetensors", "epoch_2.safetensors"} < content(job).keys()
    make_loop(None, epochs=1, hooks=hooks()).run()
    assert {path.name for path in job.iterdir()} == {"epoch_1.safetensors", "last_checkpoint", "scores.json", "earlier-1"}
    assert {"epoch_1.safetensors", "epoch_2.safetensors", "scores.json"} < content(job / "earlier-1").keys()


def test_a_given_work_dir_goes_before_that_of_a_hook(tmp_path):
    make_loop(tmp_path / "mine", hooks=[CheckpointHook(1), Cluster(tmp_path / "job")]).run()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_tilde_is_the_home_directory_in_every_option_for_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hooks = [CheckpointHook(1, out_dir="~/saves"), LoggerHook(out_dir="~/logs", writers=[CSVWriter()])]
    make_loop("~/runs/first", hooks=hooks).run()
    make_loop(Path("~/runs/second"), 3, hooks=[CheckpointHook(1)]).run(resume="~/saves/first/epoch_2.safetensors")
    assert load("~/runs/second/epoch_3.safetensors")["progress"]["iter"] == 3
    assert (tmp_path / "logs" / "first" / "scalars.csv").exists()
    assert not (tmp_path / "~").exists()
