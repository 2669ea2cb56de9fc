import multiprocessing

import pytest

from trainbus.eventloop.offload import process

from . import workers


@pytest.fixture
def quick_workers(change):
    change(process.CONTEXT, workers.quick())


@pytest.fixture
def no_worker_is_left(no_thread_is_left):
    """Fails if a worker process, or a thread of the bus, is there afterwards that was not there before."""
    yield
    assert multiprocessing.active_children() == []
