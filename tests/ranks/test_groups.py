"""The process groups of a run are torch's to keep, and to end."""

import gc
import os
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eventloop.training.distributed.launch import process_group
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
    with pytest.raises(RuntimeError, match=r"destroy_process_group\(\)"):
        ranks.gather(1)


def test_groups_have_the_users_timeout(alone):
    for group in (own_group("control"), own_group("saves")):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


def joins(folder: str, how: str) -> bool:
    """Rank 0 takes its time to connect; return whether it had connected when this rank went on."""
    rank, connected = dist.get_rank(), Path(folder, "connected")
    connect = (
        dist.new_group
        if how == "own_group"
        else partial(dist.init_process_group, "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    )

    def slowly(**options: Any) -> Any:
        group = connect(**options)
        if rank == 0:
            time.sleep(0.5)
            connected.touch()
        return group

    if how == "own_group":
        dist.new_group = slowly
        own_group("control")
        return connected.exists()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    dist.init_process_group = slowly
    with process_group():
        return connected.exists()


@pytest.mark.parametrize("how", ["own_group", "process_group"])
def test_no_rank_goes_on_and_may_end_before_all_have_connected(ranks, tmp_path, how):
    assert ranks(joins, str(tmp_path), how) == [True, True]
