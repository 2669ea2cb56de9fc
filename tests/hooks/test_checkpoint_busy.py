"""What CheckpointHook does while a checkpoint is still being written, and what the events say about it."""

import os
import stat
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop import CheckpointError, Hook, mount
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook

from .conftest import files


def stems(events):
    return [[Path(name).stem for name in event.names] for event in events]


class Disk(Hook):
    """Holds writing up from one iteration on until another begins, and keeps what is published about checkpoints."""

    priority = 95

    def __init__(self, monkeypatch, until, from_iteration=0):
        self.until = until
        self.from_iteration = from_iteration
        self.held = threading.Event()
        self.go = threading.Event()
        self.staged: list[str] = []
        self.told: dict[str, list[Any]] = {"committed": [], "skipped": [], "failed": []}
        self._fsync = os.fsync
        self._armed = from_iteration == 0
        self._hangs = False
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor):
        if self._armed:
            self.held.set()
            assert self.go.wait(30)
        self._fsync(descriptor)

    def before_train_iter(self, event):
        if event.progress.iter == self.from_iteration:
            self._armed = True
        if event.progress.iter == self.until:
            self.go.set()
            event.run.checkpoints.wait()

    def checkpoint_staged(self, event):
        self.staged.append(Path(event.path).stem)
        self._hangs = self._armed

    def before_forward(self, event):
        # The first one is being written before the second one is due.
        if self._hangs and not self.go.is_set():
            assert self.held.wait(30)

    @mount("checkpoint_committed", "checkpoint_skipped", "checkpoint_failed")
    def tell(self, event):
        self.told[event.mount_point.removeprefix("checkpoint_")].append(event)


def train(job, tmp_path, disk, iterations=8, first=(), validation=(), **options):
    """``first`` has mount points with handlers that come before the hooks."""
    hook = CheckpointHook(**{"interval": 1, "by_epoch": False} | options)
    loop = job.loop(hook, disk, work_dir=tmp_path, max_iters=iterations, train_data=job.batches(2), **dict(validation))
    for mount_point, handler in dict(first).items():
        loop.bus.on(mount_point, handler, priority=0)
    loop.run()


@pytest.mark.parametrize("staging", ["block", "overlap"])
@pytest.mark.parametrize(
    ("busy", "skipped", "kept", "staged", "reason"),
    [
        ("skip", [2, 3, 4], [1, 5], [1, 5], "another checkpoint is being written"),
        ("replace", [2, 3], [1, 4, 5], [1, 2, 3, 4, 5], "replaced by {}/iter_3.safetensors"),
    ],
)
def test_saves_due_during_a_write_are_dropped_or_the_newest_is_next(
    job, tmp_path, monkeypatch, logs, staging, busy, skipped, kept, staged, reason
):
    disk = Disk(monkeypatch, until=4)
    train(job, tmp_path, disk, iterations=5, busy=busy, staging=staging)
    assert stems(disk.told["skipped"]) == [[f"iter_{n}"] for n in skipped]
    assert files(tmp_path) == {f"iter_{n}" for n in kept}
    assert disk.staged == [f"iter_{n}" for n in staged]
    assert [load(tmp_path / f"iter_{n}.safetensors")["progress"]["iter"] for n in kept] == kept
    assert [entry["skipped"] for entry in logs if entry["event"] == "checkpoint not made"] == [*range(1, len(skipped) + 1)]
    assert disk.told["skipped"][0].reason == reason.format(tmp_path)
    assert disk.told["skipped"][0].progress.iter == 2
    assert disk.told["failed"] == []


@pytest.mark.parametrize("busy", ["skip", "replace"])
def test_a_skipped_save_evicts_no_file(job, tmp_path, monkeypatch, busy):
    """With two files to keep: those that are durable count, not those that were due."""
    disk = Disk(monkeypatch, until=7, from_iteration=2)  # iter_1 and iter_2 are durable by then, iter_3 hangs
    seen: list[set[str]] = []

    def look(event):
        if event.progress.iter <= 2:
            event.run.checkpoints.wait()
        if event.progress.iter == 6:
            seen.append(files(tmp_path))

    train(job, tmp_path, disk, first={"before_train_iter": look}, busy=busy, max_keep_ckpts=2)
    assert seen == [{"iter_1", "iter_2"}]
    assert files(tmp_path) == {"iter_3" if busy == "skip" else "iter_7", "iter_8"}
    assert (tmp_path / "last_checkpoint").read_text() == "iter_8.safetensors"


@pytest.mark.parametrize("busy", ["skip", "replace"])
def test_the_last_save_of_a_training_is_never_skipped(job, tmp_path, monkeypatch, busy):
    disk = Disk(monkeypatch, until=99)
    train(job, tmp_path, disk, iterations=4, first={"after_train": lambda event: disk.go.set()}, busy=busy)
    assert files(tmp_path) == {"iter_1", "iter_4"}
    assert load(tmp_path / "iter_4.safetensors")["progress"]["iter"] == 4


def test_a_best_score_with_a_skipped_save_is_forgotten(job, tmp_path, monkeypatch):
    """A lower score is the best then, since there is no file with the higher one."""
    disk = Disk(monkeypatch, until=2)
    hook = CheckpointHook(by_epoch=False, busy="skip", save_best="acc", save_last=False)
    data = {"val_data": job.batches(1), "metrics": {"acc": job.Scores(0.5, 0.9, 0.7)}}
    job.loop(hook, disk, work_dir=tmp_path, max_iters=3, val_interval=1, **data).run()
    assert stems(disk.told["skipped"]) == [["best_acc_iter_2"]]
    assert files(tmp_path) == {"best_acc_iter_3"}


@pytest.mark.parametrize("validation", [{}, {"val_interval": 1}], ids=["", "each with a score"])
def test_the_events_of_every_save_add_up(job, tmp_path, monkeypatch, validation):
    """Each name that was asked for is committed, skipped or failed, once."""
    disk = Disk(monkeypatch, until=5)
    if validation:
        validation |= {"val_data": job.batches(1), "metrics": {"acc": job.Scores(*range(9))}}
    train(job, tmp_path, disk, iterations=9, validation=validation, busy="replace")
    told = [name for events in disk.told.values() for event in events for name in event.names]
    assert sorted(told) == sorted(str(tmp_path / f"iter_{n}.safetensors") for n in range(1, 10))
    assert files(tmp_path) == {Path(name).stem for event in disk.told["committed"] for name in event.names}


def test_a_save_without_a_name_is_never_skipped(job, tmp_path, monkeypatch):
    disk = Disk(monkeypatch, until=99)

    def now(event):
        if event.progress.iter == 2:
            disk.go.set()
            event.run.checkpoints.save()

    options = {"interval": 2, "busy": "skip", "filename_tmpl": "n_{}.safetensors", "save_last": False}
    train(job, tmp_path, disk, iterations=5, first={"before_train_iter": now}, **options)
    assert load(tmp_path / "iter_3.safetensors")["progress"]["iter"] == 3


@pytest.mark.parametrize("staging", ["block", "overlap"])
@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_failed_save_is_loud_leaves_no_debris_and_ends_the_run_or_not(job, tmp_path, monkeypatch, staging, on_error, logs):
    fsync, calls = os.fsync, []

    def full(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            calls.append(descriptor)
        if len(calls) == 5:  # the third checkpoint; each is a file, and then its name in last_checkpoint
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    hook = CheckpointHook(interval=1, by_epoch=False, staging=staging, on_error=on_error, max_keep_ckpts=9)
    loop = job.loop(hook, work_dir=tmp_path, max_iters=8)
    with pytest.raises(CheckpointError, match="No space") if on_error == "raise" else nullcontext():
        loop.run()
    assert any(entry["event"] == "checkpoint not written" for entry in logs)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    kept = files(tmp_path)
    assert {"iter_1", "iter_2"} <= kept
    assert "iter_3" not in kept
    assert on_error == "raise" or kept == {f"iter_{n}" for n in (1, 2, 4, 5, 6, 7, 8)}
    newest = tmp_path / (tmp_path / "last_checkpoint").read_text()
    assert isinstance(load(newest)["state_dict"]["0.weight"], torch.Tensor)
