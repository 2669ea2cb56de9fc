"""What lets torchtitan train on a CPU: import it before torchtitan, whose modules copy the names of the device.

- torchtitan knows no CPU: ``Cpu`` answers the questions that it asks of a card.
- At its end, a training sleeps for 2 s.
- After the first step it calls ``torch.distributed.set_timeout``, which torch 2.13 lacks.
"""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torchtitan.trainer")  # 0.3

import torch
from torchtitan.tools import utils


class Cpu:
    """``torch.cpu`` with what ``torch.cuda`` has besides."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=2**30)

    def get_device_name(self, device):
        return "cpu"

    def current_device(self):
        return 0

    def memory_stats(self, device):
        return {}

    def reset_peak_memory_stats(self):
        pass

    empty_cache = reset_peak_memory_stats


def apply():
    """Set the stand-ins; return the module of the trainer."""
    utils.device_type, utils.device_module = "cpu", Cpu()
    for name in ("distributed.utils", "distributed.parallel_dims", "components.metrics"):
        module = __import__(f"torchtitan.{name}", fromlist=["utils"])
        for one in ("device_type", "device_module"):
            if hasattr(module, one):
                setattr(module, one, getattr(utils, one))
    from torchtitan import trainer
    from torchtitan.distributed import utils as distributed

    trainer.time = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    if not hasattr(torch.distributed, "set_timeout"):
        distributed.set_pg_timeouts = lambda timeout, parallel_dims: None
    return trainer


trainer = apply()
