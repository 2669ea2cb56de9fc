"""Where CheckpointHooks keep files: several in one directory, one in several, and from where a run goes on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainbus.eventloop import Hook
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, ParamSchedulerHook

from .conftest import files, scored

# -------------------------------------------------------------------------------------------- several in one directory


@pytest.mark.parametrize(("order", "lengths"), [(1, [7]), (-1, [7]), (1, [3, 7])], ids=["one way", "the other", "resumed"])
def test_a_file_is_kept_while_one_of_several_hooks_keeps_it(job, tmp_path, order, lengths):
    """The newest to go on from, and every second one for good."""
    for max_epochs in lengths:
        newest = CheckpointHook(1, max_keep_ckpts=1, name="newest")
        for_good = CheckpointHook(2, max_keep_ckpts=2, save_last=False, name="for good")
        job.loop(*[newest, for_good][::order], work_dir=tmp_path, max_epochs=max_epochs).run(resume="auto")
    assert files(tmp_path) == {"epoch_4", "epoch_6", "epoch_7"}


def test_the_best_of_two_hooks_is_removed_once_neither_keeps_it(job, tmp_path):
    loop = scored(tmp_path, CheckpointHook(save_best="acc", save_last=False, name="one"), 0.1, 0.3, 0.2)
    loop.bus.add(CheckpointHook(save_best="acc", save_last=False, name="other"))
    loop.run()
    assert files(tmp_path) == {"best_acc_epoch_2"}


# -------------------------------------------------------------------------------------------- one in several directories


def test_a_hook_with_another_directory_forgets_earlier_files_and_scores(job, tmp_path):
    """As in cross-validation, with one hook for all parts."""
    hook = CheckpointHook(1, max_keep_ckpts=1, save_best="acc")
    scored(tmp_path / "a", hook, 0.5, 0.9).run()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "epoch_2.safetensors").write_bytes(b"mine")
    scored(tmp_path / "b", hook, 0.3, max_epochs=1).run()
    assert files(tmp_path / "a") == {"epoch_2", "best_acc_epoch_2"}
    assert files(tmp_path / "b") == {"epoch_1", "best_acc_epoch_1", "epoch_2"}


@pytest.mark.parametrize("out_dir", [None, "out"])
def test_relative_directories_are_those_of_the_beginning(job, tmp_path, monkeypatch, out_dir):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loop = job.loop(CheckpointHook(1, out_dir=out_dir), work_dir=Path("run"))
    loop.bus.on("after_train_epoch", lambda event: os.chdir(tmp_path / "elsewhere"))
    loop.run()
    assert files(tmp_path / (out_dir or "") / "run") == {"epoch_1", "epoch_2"}
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "run" / "last_checkpoint").exists()


def test_one_directory_named_in_two_ways_is_one(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job.loop(CheckpointHook(1, max_keep_ckpts=1, out_dir="run"), work_dir=tmp_path / "run").run()
    hook = CheckpointHook(1, max_keep_ckpts=1, out_dir=tmp_path / "run")
    job.loop(hook, work_dir=Path("run"), max_epochs=3).run(resume="run/epoch_2.safetensors")
    assert files(tmp_path / "run") == {"epoch_3"}


def test_the_directory_is_not_listed_without_sharded_models(job, tmp_path, monkeypatch):
    loop = scored(tmp_path, CheckpointHook(1, by_epoch=False, max_keep_ckpts=1, save_best="acc"), 0.1, 0.2)
    listed: list[Path] = []
    real = Path.glob

    def glob(self, *args, **options):
        listed.append(self)
        return real(self, *args, **options)

    loop.bus.on("after_train_iter", lambda event: monkeypatch.setattr(Path, "glob", glob), once=1)
    loop.run()
    assert listed == []
    assert files(tmp_path) == {"iter_8", "best_acc_iter_8"}


# --------------------------------------------------------------------------------------------------- from where it goes on


def test_a_finished_run_saves_a_checkpoint_if_it_is_resumed_from_elsewhere_and_none_in_place(job, tmp_path):
    job.loop(CheckpointHook(1), work_dir=tmp_path / "a").run()
    hook = CheckpointHook(published_keys="state_dict")
    job.loop(hook, work_dir=tmp_path / "b").run(resume=tmp_path / "a" / "epoch_2.safetensors")
    assert [name.partition("-")[0] for name in files(tmp_path / "b")] == ["epoch_2", "epoch_2"]
    committed: list[Any] = []
    loop = job.loop(CheckpointHook(1), work_dir=tmp_path / "a")
    loop.bus.on("checkpoint_committed", committed.append)
    loop.run(resume="auto")
    assert committed == []


class Remembers(Hook):
    """The scores of all validations."""

    observes = True

    def __init__(self):
        self.scores: dict[int, float] = {}

    def after_val_epoch(self, event):
        self.scores[event.progress.iter] = float(event.metrics["loss"])


@pytest.mark.long
@pytest.mark.parametrize("length", [{"max_epochs": 4}, {"max_iters": 16, "val_interval": 3}])
@pytest.mark.parametrize(("interval", "by_metric"), [(-1, True), (1, True), (1, False)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_resuming_from_the_best_file_repeats_its_validation(job, tmp_path, length, interval, by_metric, elsewhere):
    """The best is another name of a file written before, unless the validation changes state. Nothing is counted twice."""
    linked = interval == 1 and not by_metric

    def run(directory, resume=None):
        model = job.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        remembers = Remembers()
        schedule = [ParamSchedulerHook(plateau, by="metric", monitor="loss")] if by_metric else []
        saver = CheckpointHook(interval, by_epoch="max_epochs" in length, save_best="loss", rule="greater")
        hooks = EMAHook(momentum=0.3), *schedule, EarlyStoppingHook("loss", patience=50, min_delta=0.0), saver, remembers
        options = {"work_dir": directory, "val_data": job.batches(1, 3), "seed": 2} | length
        loop = job.loop(*hooks, model=model, optimizer=optimizer, **options)
        loop.run(resume=resume)
        states = loop.bus.state_dict()["hooks"]
        (mine,) = (hook for hook in loop.bus.hooks if isinstance(hook, CheckpointHook))
        best = [one["name"] for one in mine.state_dict()["best"]["loss"]]
        rest = {name: state for name, state in states.items() if name != mine.label}
        return (job.weights(model), rest, best, loop.counters.saved()), remembers

    (weights, states, best, counters), through = run(tmp_path)
    (file,) = tmp_path.glob("best_*")
    state = load(file)
    place = file
    if elsewhere:
        place = tmp_path / "copy.safetensors"
        file.rename(place)
    resumed, again = run(tmp_path / "again" if elsewhere else tmp_path, place)
    assert job.same(resumed[0], weights)
    assert (resumed[1], resumed[3]) == (states, counters)
    if linked or not elsewhere:  # a score whose file is not there is forgotten
        assert resumed[2] == best == [file.name]
    assert again.scores.items() <= through.scores.items()
    made_again = min(again.scores) == state["progress"]["iter"]
    assert made_again == (state["progress"]["phase"] == "val") == linked
