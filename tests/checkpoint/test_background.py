"""The writer on a thread of its own: whom it has wait, and whether it makes progress."""

import threading

import pytest
import torch

from trainbus.eventloop.checkpoint import AsyncSaver, steps_awaited, write

from ..waiting import until


@pytest.mark.parametrize("url", ["{}", "memory://{}"])
def test_the_steps_of_a_writer_are_seen_of_a_thread_that_waits_for_it(url, tmp_path, memory):
    seen = []

    def write_late(staged, path):
        until(lambda: steps_awaited(waiting) is not None)
        before = steps_awaited(waiting)
        done = write(staged, path)
        seen.append(steps_awaited(waiting) - before)
        return done

    waiting = threading.get_ident()
    with AsyncSaver() as saver:
        for elements in (1 << 10, 10 << 20):  # a file that is written at once, and one of three pieces
            saver.save({"x": torch.zeros(elements)}, f"{url.format(tmp_path)}/{elements}.safetensors", write=write_late)
            saver.wait()
            assert steps_awaited(waiting) is None
    few, more = seen
    assert few >= 1
    assert more >= few + 2
