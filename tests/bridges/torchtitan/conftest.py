import gc
from contextlib import contextmanager

import pytest
import torch
from torch import distributed


@contextmanager
def only_process():
    """Be the only process of a training; torchtitan changes settings of the process and leaves them."""
    threads = torch.autograd.is_multithreading_enabled()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield
    distributed.destroy_process_group()
    torch.autograd.set_multithreading_enabled(threads)
    gc.enable()


@pytest.fixture(autouse=True)
def process():
    with only_process():
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The folder of the tokenizer."""
    from . import llama

    folder = tmp_path_factory.mktemp("tokenizer")
    llama.write_tokenizer(folder)
    return folder


@pytest.fixture
def make(tokenizer, tmp_path):
    """Return a function that makes a trainer of a language model, in a folder by name."""
    from . import llama

    return lambda name="run", **options: llama.make(tokenizer, tmp_path / name, **options)
