"""Damage to files at rest: all of it is found, and a run goes on from the checkpoint before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from trainbus.eventloop.checkpoint import load, save, verify
from trainbus.eventloop.errors import CheckpointDamagedError


def test_every_single_bit_flip_is_detected(tmp_path):
    path = tmp_path / "c.safetensors"
    save({"w": list(range(5))}, path)
    good = path.read_bytes()
    descriptor = os.open(path, os.O_WRONLY)
    for offset in range(len(good)):
        for bit in range(8):
            os.pwrite(descriptor, bytes([good[offset] ^ 1 << bit]), offset)
            with pytest.raises(CheckpointDamagedError):
                load(path)
        os.pwrite(descriptor, good[offset : offset + 1], offset)
    os.close(descriptor)
    assert load(path) == {"w": list(range(5))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Bytes of all files of a run, by name."""
    return {}


@pytest.fixture
def run_dir(job, trained, tmp_path_factory):
    """A directory with steps 5 and 6, the best of which is 6 (another name of the same file); the same for all tests."""
    if not trained:
        place = tmp_path_factory.mktemp("trained")
        job.loop(place).run()
        trained.update({path.name: path.read_bytes() for path in place.iterdir()})
    place = tmp_path_factory.mktemp("damaged")

    def restore() -> Path:
        for path in place.iterdir():
            path.unlink()
        for name, content in sorted(trained.items()):
            (place / name).write_bytes(content)
        (place / "best_score_iter_6.safetensors").unlink()
        (place / "best_score_iter_6.safetensors").hardlink_to(place / "iter_6.safetensors")
        return place

    return restore


def damage(data: bytes, kind: str, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    if kind == "flip":
        changed[at] ^= 1 << bit
    elif kind == "cut":
        del changed[at:]
    elif kind == "zeros":  # a block that never came to the disk
        changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
    else:
        changed += bytes(at + 1)
    return bytes(changed)


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(job, run_dir, data):
    work_dir = run_dir()
    path = work_dir / "iter_6.safetensors"
    good = path.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "zeros", "more"]))
    bad = damage(good, kind, data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7)))
    if bad == good:
        return
    path.write_bytes(bad)
    for read in (load, verify):
        with pytest.raises(CheckpointDamagedError, match="iter_6"):
            read(path)
    loop = job.loop(work_dir)
    began = []
    loop.bus.on("before_train", lambda event: began.append((event.progress.iter, event.run.checkpoints.resumed_from)))
    with capture_logs() as logs:
        loop.run(resume="auto")
    assert began == [(5, work_dir / "iter_5.safetensors")]
    assert sum("damaged" in entry["event"] for entry in logs) == 2  # both of its names
    assert job.check(work_dir, ["iter_5.safetensors", "iter_6.safetensors"]) == 6


@pytest.mark.parametrize("content", [b"", b"\0" * 5000])
def test_a_run_with_only_damaged_checkpoints_is_an_error(job, run_dir, content):
    work_dir = run_dir()
    for path in work_dir.glob("*.safetensors"):
        path.write_bytes(content)
    loop = job.loop(work_dir)
    with capture_logs(), pytest.raises(CheckpointDamagedError):
        loop.run(resume="auto")
    assert loop.counters.iter == 0
