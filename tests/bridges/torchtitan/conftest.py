import gc

import pytest
import torch
from torch import distributed


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """The only process of a training; torchtitan changes settings of the process and leaves them."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    threads = torch.autograd.is_multithreading_enabled()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch.autograd.set_multithreading_enabled(threads)
    gc.enable()
