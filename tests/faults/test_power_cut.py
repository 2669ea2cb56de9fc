"""Power is cut between any two operations of a run's saves; what was not synced is lost, damaged or in another order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainbus.eventloop.checkpoint import load, save
from trainbus.eventloop.errors import CheckpointError


@pytest.fixture
def work_dir(tmp_path) -> Path:
    """A folder that is durable before the run."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def record(disk, job, work_dir):
    disk.log.clear()
    job.loop(work_dir, disk.told).run()
    return list(disk.log)


def crashes(power_cut, log, keep=lambda operation: True) -> Iterator[tuple[frozenset, frozenset]]:
    """All different (files after a power cut, names told of before it)."""
    replay, told, seen = power_cut(), set(), set()
    for operation in [None, *log]:
        if operation is not None and operation.kind == "told":
            told.update(operation.names)
        elif operation is not None and keep(operation):
            replay.apply(operation)
        for files in replay.states():
            key = frozenset(files.items()), frozenset(told)
            if key not in seen:
                seen.add(key)
                yield key


def make(files, place: Path) -> None:
    """Have below ``place`` what a power cut has left."""
    shutil.rmtree(place)
    place.mkdir()
    for name, content in sorted(files):
        path = Path(name)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)


def test_the_recording_disk_records_all_operations(disk, job, power_cut, work_dir):
    log = record(disk, job, work_dir)
    replay = power_cut()
    for operation in log:
        replay.apply(operation)
    (files,) = replay.states()
    there = {str(path): path.read_bytes() for path in work_dir.iterdir()}
    assert {name: content for name, content in files.items() if content is not None} == there


@pytest.mark.long
def test_no_power_cut_damages_or_loses_a_reported_checkpoint(disk, job, power_cut, work_dir):
    log = record(disk, job, work_dir)
    number = 0
    for number, (files, told) in enumerate(crashes(power_cut, log)):
        make(files, work_dir)
        newest = job.check(work_dir, told)
        pointer = work_dir / "last_checkpoint"
        assert not pointer.exists() or (work_dir / pointer.read_text()).exists()  # it is written last
        if number % 4 == 0:
            assert job.resume(work_dir) == newest
    assert number > 60


@pytest.mark.long
@pytest.mark.parametrize("by_the_run", [True, False])
def test_a_new_directory_is_durable_before_the_commit_is_reported(disk, job, power_cut, tmp_path, by_the_run):
    place = tmp_path / "place"
    place.mkdir()
    work_dir = place / "runs" / "today"
    disk.log.clear()
    if not by_the_run:
        work_dir.mkdir(parents=True)
    job.loop(work_dir, disk.told).run()
    reports = []
    for files, told in crashes(power_cut, list(disk.log)):
        make(files, place)
        job.check(work_dir, told)
        reports += told
    assert reports


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_the_model_of_a_power_cut_finds_a_missing_sync(disk, job, power_cut, work_dir, kind):
    log = record(disk, job, work_dir)
    kept = crashes(power_cut, log, lambda one: one.kind != "sync" or (one.inode == 0) != (kind == "directory"))
    with pytest.raises((AssertionError, CheckpointError)):  # some power cut costs something
        for files, told in kept:
            make(files, work_dir)
            job.check(work_dir, told)


def test_an_overwritten_file_is_always_the_old_or_the_new_one(disk, power_cut, tmp_path):
    path = tmp_path / "c.safetensors"
    disk.log.clear()
    for number in range(3):
        save({"number": number}, path)
        disk.told([str(number)])
    found = set()
    for files, told in crashes(power_cut, list(disk.log)):
        newest = max(map(int, told), default=None)
        content = dict(files).get(str(path))
        if content is None:
            assert newest is None
            continue
        path.write_bytes(content)
        number = load(path)["number"]
        assert newest is None or number >= newest
        found.add((newest, number))
    assert found == {(None, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 2)}
