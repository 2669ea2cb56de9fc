"""Writers of other formats in an ``AsyncSaver``, and what is done behind a save."""

import pytest
import torch

from trainbus.eventloop.checkpoint import AsyncSaver, CommitInfo, commit_bytes, stage
from trainbus.eventloop.errors import CheckpointError

from .trees import canonical


def test_a_writer_gets_the_tree_with_the_copies_of_its_tensors(tmp_path):
    weight, seen = torch.ones(3), []

    def write_text(staged, path):
        seen.append(staged)
        tree = staged.tree()
        commit_bytes(path, repr(tree["w"].tolist()).encode())
        assert tree["w"] is not weight
        assert tree["tied"].data_ptr() == tree["w"].data_ptr()
        return CommitInfo(path, staged.bytes, "", 0.0)

    with AsyncSaver() as saver:
        saver.save({"w": weight, "tied": weight, "n": 1}, tmp_path / "x", write=write_text).result(30)
        weight += 1
        saver.wait()
        assert seen[0].released
    assert (tmp_path / "x").read_text() == "[1.0, 1.0, 1.0]"


def test_staged_trees_have_all_that_a_container_has():
    tree = {"a": (torch.arange(3), [torch.ones(2, 2).t(), torch.tensor(2j)]), 3: {"é": torch.empty(0, 4)}}
    staged = stage(tree)
    assert canonical(staged.tree()) == canonical(tree)
    staged.release()
    with pytest.raises(CheckpointError, match="released"):
        staged.tree()


def test_the_error_of_a_writer_is_told_by_the_next_call_and_frees_the_memory(tmp_path):
    seen = []

    def broken(staged, path):
        seen.append(staged)
        raise RuntimeError("my writer")

    with AsyncSaver() as saver:
        saver.save({"w": torch.ones(3)}, tmp_path / "x", write=broken)
        with pytest.raises(RuntimeError, match="my writer"):
            saver.wait()
        assert seen[0].released
        saver.save({"w": torch.ones(3)}, tmp_path / "y").result(30)


def test_an_action_is_not_done_while_the_last_save_has_failed(disk, tmp_path):
    seen = []
    disk.go.set()
    disk.error = OSError("broken disk")
    with AsyncSaver() as saver:
        for number in range(2):
            saver.save({}, tmp_path / "x")
            saver.after_commit(lambda number=number: seen.append(number))
            with pytest.raises(CheckpointError, match="broken disk"):
                saver.wait()
        assert seen == []
        disk.error = None
        saver.save({}, tmp_path / "y")
        saver.wait()
        assert seen == [0, 1]
        disk.error = OSError("broken disk")
        saver.save({}, tmp_path / "x")
        saver.after_commit(lambda: seen.append("never"))
        with pytest.raises(CheckpointError, match="broken disk"):
            saver.close()
    assert seen == [0, 1]


def test_the_error_of_an_action_is_told_and_the_others_are_done(disk, tmp_path):
    seen = []

    def broken():
        raise OSError("not removed")

    with AsyncSaver() as saver:
        future = saver.save({}, tmp_path / "x")
        saver.after_commit(broken)
        saver.after_commit(lambda: seen.append(1))
        disk.go.set()
        with pytest.raises(OSError, match="not removed"):
            saver.wait()
        assert future.exception() is None
        assert seen == [1]
