import multiprocessing

import pytest

from trainbus.eventloop.offload import process


@pytest.fixture
def quick_workers(monkeypatch):
    """Worker processes from a fork server that has imported torch already: ten times as fast as spawned ones."""
    monkeypatch.setattr(process, "_spawn", multiprocessing.get_context("forkserver"))


@pytest.fixture
def no_worker_is_left(no_thread_is_left):
    """Fails if a worker process, or a thread of the bus, is there afterwards that was not there before."""
    yield
    assert multiprocessing.active_children() == []
    assert not process._processes
