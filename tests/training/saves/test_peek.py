"""``peek`` tells how far the run of a checkpoint had come, and reads none of its tensors."""

from __future__ import annotations

import fsspec
import pytest
import torch
from structlog.testing import capture_logs

from eventloop import Bus, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from eventloop.checkpoint import save
from eventloop.training import peek


@pytest.fixture
def saved(parts, tmp_path):
    """A file after each of two epochs of three batches, and one within a validation."""
    bus = Bus()
    bus.on("after_train_epoch", lambda e: e.run.request_save(f"epoch_{e.progress.epoch + 1}.safetensors"))
    bus.on("after_val_iter", lambda e: e.run.request_save("within.safetensors"), when=lambda e: e.progress.iter == 6)
    parts.loop(bus, work_dir=tmp_path / "run").run()
    return tmp_path / "run"


def test_peek_returns_the_progress_in_a_file_of_which_it_reads_no_tensor(saved):
    progress = peek(saved / "epoch_1.safetensors")
    assert (progress.epoch, progress.iter, progress.update, progress.stage) == (1, 3, 3, "val")
    assert (progress.max_epochs, progress.max_iters) == (None, None)  # the limits are the next run's
    progress = peek(str(saved / "within.safetensors"))
    assert (progress.epoch, progress.iter, progress.stage, progress.batch_idx, progress.validation) == (2, 6, "val", 0, 1)
    path = saved / "epoch_2.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # the digest is wrong now, and the header as it was
    path.write_bytes(data)
    assert peek(path).iter == 6


def test_peek_at_a_directory_or_its_url_uses_the_newest_checkpoint(saved):
    files = fsspec.filesystem("memory")
    try:
        for path in saved.glob("*"):
            files.pipe_file(f"/peek/run/{path.name}", path.read_bytes())
        assert peek("memory://peek/run/epoch_1.safetensors").iter == 3
        assert peek("memory://peek/run").iter == 6
    finally:
        files.rm("/peek", recursive=True)
    (saved / "within.safetensors").unlink()
    (saved / "last_checkpoint").unlink()
    assert peek(saved).iter == 6
    (saved / "epoch_2.safetensors").write_bytes(b"cut off")
    with capture_logs() as logs:
        assert peek(saved).iter == 3
    assert logs[0]["path"] == str(saved / "epoch_2.safetensors")


def test_peek_at_another_file_is_an_error_naming_it(tmp_path):
    save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        peek(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        peek(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"none\.safetensors"):
        peek(tmp_path / "none.safetensors")
    (tmp_path / "weights.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointDamagedError), capture_logs():
        peek(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointDamagedError, match=str(tmp_path)), capture_logs():
        peek(tmp_path)


@pytest.mark.parametrize("name", ["old.pth", "old.safetensors"])
def test_a_file_of_torch_save_is_named_with_the_command_that_converts_it(tmp_path, name):
    torch.save({"state_dict": {}}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"`trainbus checkpoint import .* old.safetensors`") as told:
        peek(tmp_path / name)
    assert "damaged" not in str(told.value)
