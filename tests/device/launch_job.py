"""``torchrun`` on the simulated device, whose default process group is a subclass in Python; writes what it has."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

from eventloop.training.distributed.launch import own_device, process_group
from eventloop.training.distributed.ranks import Ranks, own_group
from tests.device import sim


class Group(distributed.ProcessGroup):
    """A backend of the simulated device."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):  # noqa: N802 - torch's
        return "simulated"

    def barrier(self, opts=None):
        return self.inner.barrier()

    def allreduce(self, tensors, opts=None):
        return self.inner.allreduce(tensors)


if __name__ == "__main__":
    sim.module.available = True
    distributed.Backend.register_backend("simulated", Group, devices=[sim.NAME])
    with process_group():
        device = torch.device(own_device(sim.NAME))
        assert type(distributed.group.WORLD) is Group
        everyones = Ranks(own_group("control")).gather((str(device), str(torch.ones(1, device=sim.NAME).device)))
        Path(sys.argv[1], str(distributed.get_rank())).write_text(json.dumps(everyones))
