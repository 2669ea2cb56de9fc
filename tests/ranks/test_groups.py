"""The process groups of a run are torch's to keep, and to end."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from eventloop.training.distributed.ranks import Ranks, own_group


@pytest.fixture
def alone(tmp_path):
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_is_created_once_and_forgotten_when_torch_destroys_it(alone):
    ranks = Ranks(own_group("control"))
    group = weakref.ref(ranks.group)
    assert own_group("control") is group()
    gc.disable()
    try:
        dist.destroy_process_group()
        assert group() is None  # its threads have ended: not when the interpreter does
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match=r"destroy_process_group\(\) was called during a run"):
        ranks.gather(1)


def test_groups_have_the_users_timeout(alone):
    for group in (own_group("control"), own_group("saves")):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
