"""Fresh memory for large copies."""

import sys
import threading

import pytest
import torch

from eventloop.checkpoint import memory, stage

from ..waiting import until
from .test_container import canonical

LARGE = memory._FROM // 4 + 1000


def wait_for_threads():
    until(lambda: not any(one.name == "trainbus-memory" for one in threading.enumerate()))


@pytest.mark.parametrize("size", [0, 1, 4096, memory._FROM, memory._FROM + 1, 3 * memory._FROM + 12345])
def test_memory_has_the_size_that_was_asked_for_and_keeps_what_is_written(size):
    flat = memory.allocate(size)
    assert (flat.shape, flat.dtype) == ((size,), torch.uint8)
    flat.fill_(7)  # while a thread maps it
    wait_for_threads()
    assert int(flat.sum(dtype=torch.int64)) == 7 * size


@pytest.mark.parametrize("small", [0, 50])  # copied in one piece
def test_a_large_copy_has_every_value_also_of_small_tensors(small):
    tree = {"a": torch.arange(LARGE, dtype=torch.float32), "b": torch.arange(LARGE, dtype=torch.int32)}
    tree |= {f"small {number}": torch.full((1000,), float(number)) for number in range(small)}
    staged = stage(tree)
    staged.pieces()
    wait_for_threads()
    assert canonical(staged.tree()) == canonical(tree)


@pytest.mark.parametrize(("owner", "name", "value"), [(memory, "_POPULATE_WRITE", 12345), (sys, "platform", "darwin")])
def test_a_kernel_that_does_not_map_ahead_and_another_system(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    flat = memory.allocate(memory._FROM).fill_(3)
    assert int(flat.sum(dtype=torch.int64)) == 3 * memory._FROM


def test_memory_may_be_a_part_of_a_larger_piece(monkeypatch):
    """As aligned memory is: small tensors of equal shape, which are copied together, have their own place in it."""
    module = sys.modules["eventloop.checkpoint.stage"]  # the package has a function of this name
    monkeypatch.setattr(module, "allocate", lambda size: torch.zeros(size + 4096, dtype=torch.uint8)[4096:])
    tree = {"large": torch.ones(10_000), "small": [torch.full((1000,), float(index)) for index in range(50)]}
    assert canonical(stage(tree).tree()) == canonical(tree)
