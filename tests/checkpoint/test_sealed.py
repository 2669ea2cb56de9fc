"""Large files are synced while their digest is made."""

import errno
import os

import pytest
import torch

from eventloop import CheckpointError
from eventloop.checkpoint import load, save, verify

pytestmark = pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="no fdatasync")


@pytest.fixture
def large():
    return {"weights": torch.arange(3_000_000.0)}


def test_a_file_that_was_synced_while_its_digest_was_made_is_whole(large, tmp_path):
    save(large, tmp_path / "a.safetensors")
    verify(tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors")["weights"], large["weights"])


def test_an_error_of_that_sync_is_loud_though_a_later_one_would_succeed(large, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save({"before": 1}, path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(CheckpointError, match="broken disk"):
        save(large, path)
    assert load(path) == {"before": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_where_no_thread_can_be_started_the_file_is_written_all_the_same(large, tmp_path, monkeypatch):
    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    save(large, tmp_path / "a.safetensors")
    verify(tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors")["weights"], large["weights"])
