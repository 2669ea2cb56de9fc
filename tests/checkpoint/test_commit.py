import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX, commit_bytes, link, load, remove, save, stage, verify, write
from trainbus.eventloop.errors import CheckpointError

from ..convert.test_torch_file import write as write_torch_file
from ..failing import fails
from .faults import fill_up


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def container(tree):
    return partial(write, stage(tree))


def torch_file(tree):
    return partial(write_torch_file, tree)


WRITERS = pytest.mark.parametrize(("prepared", "read"), [(container, load), (torch_file, torch.load)])


@WRITERS
def test_a_failure_of_any_operation_leaves_a_good_checkpoint_and_no_debris(tmp_path, faults, prepared, read):
    path, old = tmp_path / "c", {"w": torch.zeros(4)}
    steps = faults.count(lambda: prepared(old)(path))
    assert [step for step in steps if step != "write"] == ["open", "fsync", "close", "replace", "open", "fsync", "close"]
    assert steps.index("write") < steps.index("fsync")
    for at, step in enumerate(steps):
        write_new = prepared({"w": torch.ones(4)})
        faults.arm(at)
        with pytest.raises(CheckpointError, match=r"c \([\d,]+ bytes\): .*No space left") as caught:
            write_new(path)
        assert caught.value.__cause__ is faults.error
        faults.arm(-1)
        assert names(tmp_path) == ["c"]
        renamed = at > steps.index("replace")
        assert read(path)["w"][0].item() == (1 if renamed else 0), (at, step)
        write_new(path)
        assert read(path)["w"][0].item() == 1
        prepared(old)(path)


def test_a_failure_of_the_first_write_ever_leaves_nothing(tmp_path, faults):
    steps = faults.count(lambda: commit_bytes(tmp_path / "x", b"abc"))
    remove(tmp_path / "x")
    for at in range(steps.index("replace") + 1):
        faults.arm(at)
        with pytest.raises(CheckpointError):
            commit_bytes(tmp_path / "x", b"abc")
        assert names(tmp_path) == []


@WRITERS
@pytest.mark.parametrize("room", [3000, 1_000_000])
def test_a_disk_that_fills_up_in_the_middle_is_reported(tmp_path, monkeypatch, prepared, read, room):
    prepared({"w": torch.zeros(4)})(tmp_path / "c")
    fill_up(monkeypatch, room)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        prepared({"w": torch.ones(1 << 20)})(tmp_path / "c")
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert read(tmp_path / "c")["w"].shape == (4,)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("at_once", [0, 1, 7, 500, 1100, 2000])
def test_short_writes_are_continued(tmp_path, monkeypatch, at_once):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: at_once and real(descriptor, b"".join(parts)[:at_once]))
    tree = {"w": torch.arange(100)}
    save(tree, tmp_path / "c")
    assert torch.equal(load(tmp_path / "c")["w"], tree["w"])
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)  # a system that takes no bytes
    with pytest.raises(CheckpointError):
        commit_bytes(tmp_path / "x", b"abc")
    assert names(tmp_path) == ["c"]


def test_an_interrupt_removes_the_temporary_file_and_passes_through(tmp_path, faults):
    faults.error = KeyboardInterrupt()
    steps = faults.count(lambda: commit_bytes(tmp_path / "x", b"old"))
    faults.arm(steps.index("fsync"))
    with pytest.raises(KeyboardInterrupt):
        commit_bytes(tmp_path / "x", b"new")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_temporary_file_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, fails(PermissionError(errno.EPERM, "not permitted")))
    with pytest.raises(CheckpointError) as caught:
        commit_bytes(tmp_path / "x", b"abc")
    assert "could not be removed" in caught.value.__cause__.__notes__[0]
    assert [name.startswith(TEMPORARY_PREFIX) for name in names(tmp_path)] == [True]


def test_a_file_system_without_directory_fsync_is_fine(tmp_path, faults):
    steps = faults.count(lambda: commit_bytes(tmp_path / "x", b"old"))
    faults.error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    faults.arm(len(steps) - 1 - steps[::-1].index("fsync"))
    commit_bytes(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_missing_directory_or_file_to_link_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere/c") as caught:
        save({}, tmp_path / "nowhere" / "c")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(CheckpointError, match="nothing") as caught:
        link(tmp_path / "nothing", tmp_path / "best")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert names(tmp_path) == []


def test_committed_bytes_replace_the_old_ones_with_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    for data in (b"one", b"", b"three"):
        for name in ("x", "x" * 255):  # as long as the file system allows
            commit_bytes(tmp_path / name, data)
            assert (tmp_path / name).read_bytes() == data
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert names(tmp_path) == ["usual", "x", "x" * 255]


def test_a_link_is_a_second_name_that_survives_the_first(tmp_path):
    save({"n": 1}, tmp_path / "epoch_1")
    save({"n": 2}, tmp_path / "epoch_2")
    for number in (1, 2, 2):
        link(tmp_path / f"epoch_{number}", tmp_path / "best")
        assert (tmp_path / "best").samefile(tmp_path / f"epoch_{number}")
    remove(tmp_path / "epoch_2")
    assert load(tmp_path / "best") == {"n": 2}
    assert names(tmp_path) == ["best", "epoch_1"]


def test_a_link_is_a_copy_where_hard_links_are_not_possible(tmp_path, monkeypatch):
    save({"n": 1}, tmp_path / "epoch_1")
    monkeypatch.setattr(os, "link", fails(PermissionError(errno.EPERM, "no hard links here")))
    link(tmp_path / "epoch_1", tmp_path / "best")
    assert not (tmp_path / "best").samefile(tmp_path / "epoch_1")
    assert load(tmp_path / "best") == {"n": 1}
    assert names(tmp_path) == ["best", "epoch_1"]


@pytest.mark.parametrize("linked", [True, False])
def test_a_failure_while_linking_leaves_the_old_name_and_no_debris(tmp_path, faults, monkeypatch, linked):
    old, new, best = tmp_path / "old", tmp_path / "new", tmp_path / "best"
    save({"n": 1}, old)
    save({"n": 2}, new)
    if not linked:
        monkeypatch.setattr(Path, "hardlink_to", fails(OSError("no links")))
    link(old, best)
    steps = faults.count(lambda: link(new, best))
    for at in range(len(steps)):
        link(old, best)
        faults.arm(at)
        if steps[at] == "link":
            link(new, best)  # falls back to a copy
        else:
            with pytest.raises(CheckpointError, match="best"):
                link(new, best)
        faults.arm(-1)
        assert names(tmp_path) == ["best", "new", "old"]
        assert load(best)["n"] == (2 if at > steps.index("replace") or steps[at] == "link" else 1)


def test_removing_a_missing_file_is_fine_and_a_refusal_is_an_error(tmp_path, monkeypatch):
    remove(tmp_path / "x")
    commit_bytes(tmp_path / "x", b"")
    remove(tmp_path / "x")
    assert names(tmp_path) == []
    (tmp_path / "directory").mkdir()
    with pytest.raises(CheckpointError, match="directory"):
        remove(tmp_path / "directory")


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="no fdatasync")
def test_a_large_file_is_complete_and_an_error_of_its_sync_is_loud_though_a_later_one_would_succeed(tmp_path, monkeypatch):
    large, path = {"weights": torch.arange(3_000_000.0)}, tmp_path / "a.safetensors"
    save(large, path)
    verify(path)
    assert torch.equal(load(path)["weights"], large["weights"])
    save({"before": 1}, path)
    monkeypatch.setattr(os, "fdatasync", fails(OSError(errno.EIO, "broken disk")))
    with pytest.raises(CheckpointError, match="broken disk"):
        save(large, path)
    assert load(path) == {"before": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
