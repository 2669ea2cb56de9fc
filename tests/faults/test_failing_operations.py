"""Every file operation of a save fails in turn: each case is loud and costs no committed checkpoint, or ends in a good one."""

from __future__ import annotations

import errno
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX, commit_bytes, link, load, remove, save
from trainbus.eventloop.errors import CheckpointError, ConfigurationError

ERRORS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR]
OLD, NEW = {"w": torch.zeros(200), "n": 0}, {"w": torch.ones(200), "n": 1}


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def operations(disk, action) -> int:
    before = disk.count
    action()
    return disk.count - before


def is_whole(path: Path, number: int) -> bool:
    tree = load(path)
    assert (tree["w"] == tree["n"]).all()
    return tree["n"] == number


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_failing_operation_of_a_save_raises_and_leaves_the_old_or_the_new_file(disk, tmp_path, error):
    path = tmp_path / "c.safetensors"
    save(OLD, path)
    refused = set()
    for at in range(operations(disk, lambda: save(OLD, path))):
        disk.fail(at, error)
        with pytest.raises(CheckpointError, match=r"c\.safetensors") as caught:
            save(NEW, path)
        assert caught.value.__cause__.errno == error
        refused.add(disk.failed)
        assert names(tmp_path) == ["c.safetensors"]
        assert is_whole(path, 0) or disk.failed in ("open", "fsync", "close")  # after the rename, only the directory's
        disk.heal()
        save(OLD, path)
    assert {"open", "write", "fsync", "close", "replace"} <= refused | {"replace" if "rename" in refused else ""}


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("piece", [None, 1000, 7])
def test_a_full_disk_at_any_offset_keeps_the_old_file(disk, tmp_path, error, piece):
    path = tmp_path / "c.safetensors"
    save(OLD, path)
    size = path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for room in sorted(
        {*range(0, size, 97), 1, 7, 8, 9, header - 1, header, header + 1, header + 800, size - 5, size - 4, size - 1}
    ):
        disk.fill_up(room, piece, error)
        with pytest.raises(CheckpointError, match=r"c\.safetensors") as caught:
            save(NEW, path)
        assert caught.value.__cause__.errno == error
        disk.heal()
        assert names(tmp_path) == ["c.safetensors"]
        assert is_whole(path, 0)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_short_writes_produce_a_valid_file(disk, tmp_path, piece):
    disk.fill_up(1 << 30, piece)
    save(NEW, tmp_path / "c.safetensors")
    assert is_whole(tmp_path / "c.safetensors", 1)


def test_interrupted_system_calls_do_not_damage_a_file(tmp_path):
    """Python makes an interrupted call again; what was written before it counts."""
    tree = {"w": torch.arange(3_000_000)}
    heard = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    try:
        for number in range(3):
            save(tree, tmp_path / f"{number}.safetensors")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard
    for number in range(3):
        assert torch.equal(load(tmp_path / f"{number}.safetensors")["w"], tree["w"])


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_failing_link_or_removal_loses_no_file(disk, tmp_path, error):
    for number, tree in enumerate((OLD, NEW)):
        save(tree, tmp_path / f"{number}")
    best = tmp_path / "best"
    link(tmp_path / "0", best)
    for at in range(operations(disk, lambda: link(tmp_path / "1", best))):
        link(tmp_path / "0", best)
        disk.fail(at, error)
        try:
            link(tmp_path / "1", best)
            assert disk.failed == "link"  # a file system without hard links: it was copied
        except CheckpointError as failure:
            assert failure.__cause__.errno == error
        disk.heal()
        assert names(tmp_path) == ["0", "1", "best"]
        assert is_whole(best, 0) or is_whole(best, 1)
    for at in range(operations(disk, lambda: remove(best))):
        link(tmp_path / "0", best)
        disk.fail(at, error)
        with pytest.raises(CheckpointError, match="best"):
            remove(best)
        disk.heal()
        assert not best.exists() or is_whole(best, 0)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_failing_operation_on_a_small_file_leaves_the_old_or_the_new_bytes(disk, tmp_path, error):
    path = tmp_path / "last_checkpoint"
    commit_bytes(path, b"old")
    for at in range(operations(disk, lambda: commit_bytes(path, b"old"))):
        disk.fail(at, error)
        with pytest.raises(CheckpointError, match="last_checkpoint"):
            commit_bytes(path, b"new")
        disk.heal()
        assert names(tmp_path) == ["last_checkpoint"]
        assert path.read_bytes() in (b"old", b"new")


# ------------------------------------------------------------------------- a whole run: pointer, retention, best links


def run_with_failures(job, disk, work_dir, on_error):
    """Train once for each operation of the saves, which then fails; yield what was heard, and heal the disk."""
    clean = work_dir.with_name("clean")
    number = operations(disk, lambda: job.loop(clean, steps=3).run())
    for at in range(number):
        directory = work_dir.with_name(f"{on_error}_{at}")
        told, failed = [], []
        loop = job.loop(directory, told.extend, steps=3, on_error=on_error)
        loop.bus.on("checkpoint_failed", lambda event, failed=failed: failed.extend(event.names))
        disk.fail(at, ERRORS[at % len(ERRORS)])
        raised = None
        with capture_logs() as logs:
            try:
                loop.run()
            except (CheckpointError, ConfigurationError, OSError) as error:
                raised = error
        disk.heal()
        # A lock that fails for the moment is logged, and costs nothing; the directory is then made by the first save.
        # Scores that cannot be written beside a checkpoint are logged, and cost no checkpoint.
        lost = [entry for entry in logs if entry["log_level"] in ("warning", "error")]
        told_of = [entry for entry in lost if not re.search("lock|scores", entry["event"])]
        yield directory, loop, told, failed, raised, told_of


@pytest.mark.long
@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_any_failing_operation_in_a_run_raises_and_loses_no_committed_checkpoint(disk, job, tmp_path, on_error):
    refused = []
    for directory, loop, told, failed, raised, logs in run_with_failures(job, disk, tmp_path / "run", on_error):
        refused.append(disk.failed)
        there = {Path(name).name.removesuffix(".safetensors") for name in told}
        if not (raised or failed or logs):  # a second name that became a copy, a directory that was there already
            assert there == {f"{kind}iter_{step}" for kind in ("", "best_score_") for step in (1, 2, 3)}
        elif on_error == "raise":
            assert raised is not None, disk.failed
        elif isinstance(raised, ConfigurationError):  # the work dir cannot be written, which is known before the training
            assert loop.counters.iter == 0
        else:
            assert raised is None
            assert loop.counters.iter == 3
        newest = job.check(directory, [f"{name}.safetensors" for name in there])
        assert disk.failed == "unlink" or not list(directory.glob(f"{TEMPORARY_PREFIX}*"))
        if len(refused) % 5 == 0:
            assert job.resume(directory) == newest
            assert job.check(directory, []) == job.STEPS
    assert {"mkdir", "open", "write", "fsync", "close", "link", "unlink"} <= set(refused)


def test_a_directory_removed_during_a_run_is_created_again(job, tmp_path):
    told = []
    loop = job.loop(tmp_path / "run", told.extend)

    @loop.bus.on("after_train_iter", once=3, priority=0)
    def remove_it(event):
        event.run.checkpoints.wait()
        shutil.rmtree(tmp_path / "run")

    loop.run()
    assert len(told) >= job.STEPS
    assert job.check(tmp_path / "run", []) == job.STEPS


def test_a_full_disk_loses_no_old_checkpoint_and_errors_can_be_logged_only(disk, job, tmp_path):
    """Nothing can be written from the third step on, not only once."""
    told = []
    loop = job.loop(tmp_path / "run", told.extend, on_error="log")
    loop.bus.on("after_train_iter", lambda event: disk.fill_up(0, error=errno.ENOSPC), once=3)
    with capture_logs() as logs:
        loop.run()
    assert loop.counters.iter == job.STEPS
    assert [entry["log_level"] for entry in logs if entry["event"] == "checkpoint not written"]
    assert job.check(tmp_path / "run", [Path(name).name for name in told]) in (1, 2)
    disk.heal()
    job.resume(tmp_path / "run")
    assert job.check(tmp_path / "run", []) == job.STEPS
