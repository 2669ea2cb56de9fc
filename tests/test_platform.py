"""What is asked of the operating system."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from trainbus.eventloop import platform


@pytest.mark.skipif(not platform.memory_in_use(), reason="this system does not tell")
def test_the_memory_in_use_is_that_of_this_process():
    before = platform.memory_in_use()
    array = np.ones(8 << 20)
    assert platform.memory_in_use() - before > array.nbytes // 2
    assert platform.memory_in_use() <= (platform.most_memory() or 0) + (16 << 20)
    assert platform.memory_in_use() < platform.memory_of_machine()


def test_a_locked_file_is_locked_for_each_other_descriptor_until_it_is_closed(tmp_path):
    first, second = (platform.open_file(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    platform.lock(first)
    with pytest.raises(BlockingIOError):
        platform.lock(second)
    os.close(first)
    platform.lock(second)
    os.close(second)


def test_the_bytes_of_a_file_are_those_that_were_written(tmp_path):
    descriptor = platform.open_file(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    parts = (b"a\n", memoryview(b"b\r\nc"))
    if not platform.write_together(descriptor, parts):
        for part in parts:
            os.write(descriptor, part)
    platform.sync_data(descriptor)
    platform.sync(descriptor)
    assert platform.read_at(descriptor, 3, 1) == b"\nb\r"
    os.close(descriptor)
    platform.sync_path(tmp_path / "file")
    platform.sync_path(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"a\nb\r\nc"


def test_a_link_is_not_opened_unless_that_is_wanted(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic link"):
        platform.open_file(tmp_path / "link", os.O_RDONLY)
    os.close(platform.open_file(tmp_path / "link", os.O_RDONLY, follow=True))


def test_names_are_made_once():
    names = [platform.unique_name() for _ in range(1000)]
    assert len({*names}) == len(names)


def test_a_process_runs_until_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert platform.is_running(child.pid) in (True, None)
    boot, began = platform.began(child.pid)
    assert (boot, began) == platform.began(child.pid)
    child.communicate(b"\n")
    assert not platform.is_running(child.pid)


def test_signals_that_wait_come_when_they_may(monkeypatch):
    came = []
    before = signal.getsignal(signal.SIGTERM)
    platform.handle_signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        waiting = platform.block_signals([signal.SIGTERM])
        signal.raise_signal(signal.SIGTERM)
        assert came == ([] if waiting else [signal.SIGTERM])  # where no signal can wait, it has come
        assert not platform.block_signals([signal.SIGTERM])  # it waits already
        platform.unblock_signals(waiting)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_are_those_that_the_system_has():
    assert platform.signals("SIGTERM", "SIGNONE", "SIGINT") == (signal.SIGTERM, signal.SIGINT)


def test_what_others_have_open_is_waited_for_where_files_in_use_stay(monkeypatch, change):
    tries = []

    def removed(name):
        tries.append(name)
        if len(tries) < 3:
            raise PermissionError
        return "done"

    monkeypatch.setattr(platform, "IN_USE_STAYS", True)
    assert platform.patiently(removed, "name") == "done"
    assert tries == ["name"] * 3
    tries.clear()
    change(platform.PATIENCE, 0.0)
    monkeypatch.setattr(platform.time, "sleep", lambda seconds: None)
    with pytest.raises(PermissionError):
        platform.patiently(removed, "name")
    monkeypatch.setattr(platform, "IN_USE_STAYS", False)
    tries.clear()
    with pytest.raises(PermissionError):
        platform.patiently(removed, "name")
    assert tries == ["name"]
